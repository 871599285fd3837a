"""`surgetank workflow explain`: the table of known and derived facts, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .derive import Facts, Persist, peak_live_bytes, schedule
from .graph import Workflow
from .hints import hints

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def shown_bytes(count: float | None) -> str:
    """`1.5 GiB`; `?` if it is not known."""
    if count is None:
        return "?"
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.1f} {_UNITS[unit]}"


def summary(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist, cores: float) -> dict[str, Any]:
    """Totals, the peak of live bytes on `cores` cores with and without lifetimes, and the unknown facts."""
    made = {path: fact for path, fact in facts.items() if fact.maker is not None}
    spans = schedule(workflow, cores)
    return {
        "name": workflow.name,
        "source": workflow.source,
        "persist": persist.value,
        "cores": cores,
        "tasks": len(workflow.tasks),
        "files": len(facts),
        "input_bytes": _sum(facts[file.path] for file in workflow.inputs()),
        "made_bytes": _sum(made.values()),
        "disposable_bytes": _sum(fact for fact in made.values() if fact.disposable),
        "to_store_bytes": _sum(fact for fact in made.values() if not fact.disposable),
        "peak_live_bytes": peak_live_bytes(workflow, facts, spans, lifetimes=True),
        "peak_live_bytes_without_lifetimes": peak_live_bytes(workflow, facts, spans, lifetimes=False),
        "files_of_unknown_size": sum(fact.size_bytes is None for fact in made.values()),
        "incomplete": workflow.incomplete,
    }


def rows(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist) -> list[dict[str, Any]]:
    """One object per file, in the order of the description."""
    hint_of = {
        hint["path"]: {key: value for key, value in hint.items() if key != "path"}
        for hint in hints(workflow, facts, persist)
    }
    return [
        {
            "path": path,
            "pattern": fact.pattern.value,
            "lifetime": fact.lifetime.value,
            "size_bytes": fact.size_bytes,
            "size_from": fact.size_from,
            "maker": fact.maker,
            "readers": fact.readers,
            "group": fact.group,
            "hint": hint_of.get(path, {}),
        }
        for path, fact in facts.items()
    ]


def text(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist, cores: float, *, every: bool) -> str:
    """The table; files of one kind of maker, pattern and lifetime share a line unless `every` is set."""
    total = summary(workflow, facts, persist, cores)
    lines = [
        f"{total['name']}  ({total['source']})",
        f"{total['tasks']} tasks, {total['files']} files: reads {shown_bytes(total['input_bytes'])}, makes "
        f"{shown_bytes(total['made_bytes'])}, of that {shown_bytes(total['to_store_bytes'])} go to the store"
        f" (persist = {persist.value})",
        f"live at once on {cores:g} cores: {shown_bytes(total['peak_live_bytes'])} with lifetimes, "
        f"{shown_bytes(total['peak_live_bytes_without_lifetimes'])} without",
    ]
    if total["files_of_unknown_size"]:
        lines.append(
            f"{total['files_of_unknown_size']} files have no known size: they count as 0 here (--history helps)"
        )
    lines += [f"not known yet: {why}" for why in workflow.incomplete]
    lines.append("")
    head = ("FILE", "PATTERN", "LIFETIME", "SIZE", "MADE BY", "READ BY", "HINT")
    table = _each(workflow, facts, persist) if every else _grouped(workflow, facts, persist)
    return "\n".join(lines + aligned([head, *table])) + "\n"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _each(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist) -> list[tuple[str, ...]]:
    return [
        (
            printable(row["path"]),
            row["pattern"],
            row["lifetime"],
            shown_bytes(row["size_bytes"]),
            printable(row["maker"] or "-"),
            _several([printable(reader) for reader in row["readers"]]),
            _hint(row["hint"]),
        )
        for row in rows(workflow, facts, persist)
    ]


def _grouped(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist) -> list[tuple[str, ...]]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    hint_of: dict[str, dict[str, Any]] = {row["path"]: row["hint"] for row in rows(workflow, facts, persist)}
    for path, fact in facts.items():
        kinds = Counter(workflow.tasks[reader].kind for reader in fact.readers)
        maker = "-" if fact.maker is None else workflow.tasks[fact.maker].kind
        hint = _hint({key: value for key, value in hint_of[path].items() if key != "size"})
        key = (maker, fact.pattern, fact.lifetime, tuple(sorted(kinds)), hint)
        groups.setdefault(key, []).append(path)
    table: list[tuple[str, ...]] = []
    for (maker, pattern, lifetime, kinds, hint), paths in groups.items():
        sizes = [size for path in paths if (size := facts[path].size_bytes) is not None]
        name = printable(paths[0]) if len(paths) == 1 else f"{len(paths)} files: {printable(paths[0])} …"
        table.append(
            (
                name,
                pattern.value,
                lifetime.value,
                shown_bytes(sum(sizes)) if sizes else "?",
                printable(maker),
                _several([printable(kind) for kind in kinds]),
                hint,
            )
        )
    return table


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "-"


def _hint(hint: Mapping[str, Any]) -> str:
    return (
        " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in hint.items())
        or "-"
    )


def printable(name: str) -> str:
    """A name that cannot move the terminal's cursor or break the table."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def _sum(some: Any) -> int:
    return sum(fact.size_bytes or 0 for fact in some)
