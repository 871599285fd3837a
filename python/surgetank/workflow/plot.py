"""`surgetank workflow plot`: the graph as one SVG file, tasks in columns by depth, files coloured by lifetime and tier.

Many tasks of one kind at one depth are drawn as one box, or a real workflow would have too many lines to read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from .derive import Facts, Lifetime
from .explain import printable, shown_bytes
from .graph import Workflow

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 34, 80, 14, 24
_LIFETIME = {Lifetime.TASK: "#9aa5b1", Lifetime.WORKFLOW: "#e08e2b", Lifetime.FOREVER: "#2b6cb0"}
_TIERS = ("#2f855a", "#805ad5", "#c05621", "#2c7a7b", "#b83280")
_STORE = "#4a5568"


@dataclass
class _Box:
    title: str
    below: str
    colour: str
    is_task: bool
    column: int
    members: list[str] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0


def svg(
    workflow: Workflow, facts: Mapping[str, Facts], tier_of: Mapping[str, str] | None = None, *, boxes_max: int = 80
) -> str:
    """The drawing. `tier_of` gives the files' tiers (from `surgetank why --json`, or the preferred tier); without it
    the colours show only lifetimes. Above `boxes_max` boxes, tasks and files are merged by kind."""
    together = len(workflow.tasks) + len(workflow.files) > boxes_max
    depth: dict[str, int] = {}
    for one in workflow.order:
        depth[one] = 1 + max((depth[parent] for parent in workflow.parents[one]), default=0)
    tiers = sorted({*(tier_of or {}).values()} - {"store"})
    colour_of_tier = {"store": _STORE} | {tier: _TIERS[at % len(_TIERS)] for at, tier in enumerate(tiers)}
    boxes: dict[tuple[object, ...], _Box] = {}
    task_box: dict[str, tuple[object, ...]] = {}
    file_box: dict[str, tuple[object, ...]] = {}
    for name, task in workflow.tasks.items():
        key: tuple[object, ...] = ("task", task.kind, depth[name]) if together else ("task", name)
        task_box[name] = key
        box = boxes.setdefault(key, _Box(task.kind if together else name, "", "#edf2f7", True, 2 * depth[name]))
        box.members.append(name)
    for path, fact in facts.items():
        # Next to its maker; an input is before its first reader.
        readers = [depth[reader] for reader in fact.readers]
        at = 2 * depth[fact.maker] + 1 if fact.maker is not None else 2 * min(readers, default=1) - 1
        tier = (tier_of or {}).get(path)
        ends = tuple(sorted({str(task_box[reader]) for reader in fact.readers}))
        maker = None if fact.maker is None else str(task_box[fact.maker])
        key = ("files", maker, ends, fact.lifetime, tier) if together else ("file", path)
        file_box[path] = key
        colour = colour_of_tier[tier] if tier is not None else _LIFETIME[fact.lifetime]
        boxes.setdefault(key, _Box(path, "", colour, False, at)).members.append(path)
    for box in boxes.values():
        if box.is_task:
            box.below = f"{len(box.members)} tasks" if len(box.members) > 1 else ""
        else:
            sizes = [facts[path].size_bytes for path in box.members]
            known = [size for size in sizes if size is not None]
            life = facts[box.members[0]].lifetime.value
            where = (tier_of or {}).get(box.members[0])
            size = shown_bytes(sum(known)) if known else "? B"
            box.below = f"{size}, {life}" + (f", {where}" if where else "")
            if len(box.members) > 1:
                box.title = f"{len(box.members)} files: {box.members[0]}"
    links: dict[tuple[tuple[object, ...], tuple[object, ...]], int] = defaultdict(int)
    for path, fact in facts.items():
        if fact.maker is not None:
            links[task_box[fact.maker], file_box[path]] += 1
        for reader in fact.readers:
            links[file_box[path], task_box[reader]] += 1
    for name, waiting in workflow.tasks.items():
        for parent in waiting.after:
            links[task_box[parent], task_box[name]] += 1
    width, height = _laid_out(boxes, links)
    return _drawn(workflow, boxes, links, width, height, [*_legend(tier_of is not None, colour_of_tier)])


def _laid_out(
    boxes: Mapping[tuple[object, ...], _Box], links: Mapping[tuple[tuple[object, ...], tuple[object, ...]], int]
) -> tuple[float, float]:
    columns: dict[int, list[tuple[object, ...]]] = defaultdict(list)
    for key, box in boxes.items():
        columns[box.column].append(key)
    before: dict[tuple[object, ...], list[tuple[object, ...]]] = defaultdict(list)
    for one, other in links:
        before[other].append(one)
    tallest = max((len(column) for column in columns.values()), default=1)
    for number, at in enumerate(sorted(columns)):
        column = columns[at]
        # Next to the middle of its predecessors: fewer lines cross.
        middle = {key: _mean([boxes[one].y for one in before[key] if boxes[one].column < at]) for key in column}
        column.sort(key=lambda key: middle[key])
        top = _MARGIN + 40 + (tallest - len(column)) * (_HEIGHT + _GAP_Y) / 2
        for row, key in enumerate(column):
            boxes[key].x = _MARGIN + number * (_WIDTH + _GAP_X)
            boxes[key].y = top + row * (_HEIGHT + _GAP_Y)
    width = 2 * _MARGIN + len(columns) * (_WIDTH + _GAP_X) - _GAP_X
    return max(width, 560), 2 * _MARGIN + 40 + tallest * (_HEIGHT + _GAP_Y)


def _mean(some: list[float]) -> float:
    return sum(some) / len(some) if some else 0.0


def _legend(has_tiers: bool, colour_of_tier: Mapping[str, str]) -> list[tuple[str, str]]:
    if has_tiers:
        return [(colour, f"in {tier}") for tier, colour in colour_of_tier.items()]
    words = {
        Lifetime.TASK: "its task's only",
        Lifetime.WORKFLOW: "until its last reader is done",
        Lifetime.FOREVER: "kept",
    }
    return [(colour, words[lifetime]) for lifetime, colour in _LIFETIME.items()]


def _drawn(
    workflow: Workflow,
    boxes: Mapping[tuple[object, ...], _Box],
    links: Mapping[tuple[tuple[object, ...], tuple[object, ...]], int],
    width: float,
    height: float,
    legend: list[tuple[str, str]],
) -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN}" font-size="14" font-weight="bold">{escape(printable(workflow.name))}</text>',
    ]
    x = float(_MARGIN)
    for colour, words in legend:
        out.append(f'<rect x="{x:.0f}" y="{_MARGIN + 10}" width="12" height="12" rx="2" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{_MARGIN + 20}">{escape(words)}</text>')
        x += 40 + 6.5 * len(words)
    for (one, other), count in links.items():
        a, b = boxes[one], boxes[other]
        x1, y1, x2, y2 = a.x + _WIDTH, a.y + _HEIGHT / 2, b.x, b.y + _HEIGHT / 2
        thick = min(1 + count**0.5 / 3, 5)
        out.append(
            f'<path d="M{x1:.0f},{y1:.0f} C{x1 + _GAP_X / 2:.0f},{y1:.0f} {x2 - _GAP_X / 2:.0f},{y2:.0f} {x2:.0f},{y2:.0f}" '
            f'fill="none" stroke="#a0aec0" stroke-width="{thick:.1f}"/>'
        )
    for box in boxes.values():
        names = "\n".join(printable(name) for name in box.members[:20]) + ("\n…" if len(box.members) > 20 else "")
        fill, ink = (box.colour, "#1a202c") if box.is_task else (box.colour, "white")
        rx = 4 if box.is_task else 15
        out.append(f"<g><title>{escape(names)}</title>")
        out.append(
            f"<rect x={quoteattr(f'{box.x:.0f}')} y={quoteattr(f'{box.y:.0f}')} width={quoteattr(str(_WIDTH))} "
            f"height={quoteattr(str(_HEIGHT))} rx={quoteattr(str(rx))} fill={quoteattr(fill)} stroke={quoteattr('#4a5568')}/>"
        )
        for line, dy in ((_short(box.title), 14), (box.below, 27)) if box.below else ((_short(box.title), 21),):
            out.append(
                f'<text x="{box.x + _WIDTH / 2:.0f}" y="{box.y + dy:.0f}" text-anchor="middle" fill="{ink}">{escape(line)}</text>'
            )
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _short(text: str) -> str:
    """Both ends of a name carry the most information."""
    text = printable(text)
    return text if len(text) <= 25 else f"{text[:12]}…{text[-12:]}"
