"""The targets of the suite (a paper's result, and the target here), beside the measured figures."""

import statistics

from suite.figures import bound, faster, least_tail_s, of
from suite.statistics import Ratio

# The least lower end of an interval that does not count as a loss.
NO_LOSS = 0.97
# Below this share, the saving of by-hand is within the spread of the runs.
LEAST_LIMIT = 0.05


def cells(records: list[dict], item: str, variant: str, series: str = "idle") -> list[tuple[dict, dict, Ratio]]:
    """The cells in which this variant was measured beside the store."""
    found = []
    for record in records:
        if record["item"] == item and record["series"] == series:
            for cell in record["cells"]:
                if (ratio := faster(cell, variant, "store")) is not None:
                    found.append((record, cell, ratio))
    return found


def where(record: dict, cell: dict) -> str:
    return f"{cell['name']} on {record['store']['name']}"


def verdict(good: bool | None) -> str:
    """A dash where there is no target."""
    return "–" if good is None else "✓" if good else "✗"


def in_memory(records: list[dict]) -> list[list[str]]:
    found = cells(records, "incrementation", "in-memory")
    if not found:
        return []
    record, cell, best = max(found, key=lambda one: one[2].median)
    most = bound(record, cell)
    rows = [
        ["incrementation, in-memory ÷ store, best point", "≤ 3 ×", "≥ 3 ×", f"{best} × at {where(record, cell)}; limit {most:.1f} ×, if only the store takes time", verdict(best.median >= 3)],
    ]
    record, cell, worst = min(found, key=lambda one: one[2].low)
    rows.append(["incrementation, in-memory ÷ store, worst point", "0.9 ×", f"lower end ≥ {NO_LOSS}", f"{worst} × at {where(record, cell)}", verdict(worst.low >= NO_LOSS)])
    hands = [(record, cell, ratio) for record, cell, _ in found if (ratio := faster(cell, "in-memory", "by-hand")) is not None]
    if hands:
        record, cell, worst = min(hands, key=lambda one: one[2].median)
        rows.append(["incrementation, in-memory ÷ by-hand, worst point", "–", "≥ 0.9", f"{worst} at {where(record, cell)}", verdict(worst.median >= 0.9)])
    return rows


def copy_all(records: list[dict]) -> list[list[str]]:
    found = cells(records, "incrementation", "copy-all")
    rows = []
    for record, cell, ratio in found:
        how = cell["parameters"].get("compute")
        if how == "cpu":
            target, good = "≥ 1.7 ×", ratio.median >= 1.7
        elif how is None:
            target, good = f"lower end ≥ {NO_LOSS}", ratio.low >= NO_LOSS
        else:
            target, good = "none", None
        rows.append([f"{where(record, cell)} ÷ store", "0.77 ×", target, f"{ratio} ×", verdict(good)])
    return rows


def terrain(records: list[dict]) -> list[list[str]]:
    """The target is 35 %, or 0.9 of what by-hand saves where that is less. No target where by-hand saves nothing."""
    rows = []
    for variant in ("copy-all", "in-memory"):
        for record, cell, ratio in cells(records, "terrain", variant):
            if not record["store"]["simulated"]:
                continue
            saved = 1 - 1 / ratio.median
            by_hand = faster(cell, "by-hand", "store") if variant == "in-memory" else None
            limit = 1 - 1 / by_hand.median if by_hand else 0.35
            need, target = (0.35, "≥ 35 %") if limit >= 0.35 else (0.9 * limit, f"≥ 35 %, or 0.9 × the {limit:.0%} of by-hand")
            met = verdict(saved >= need) if limit >= LEAST_LIMIT else "–"
            rows.append([f"terrain, {where(record, cell)}, {variant}: time saved", "35 %", target, f"{saved:.0%} ({1 - 1 / ratio.low:.0%} – {1 - 1 / ratio.high:.0%})", met])
    return rows


def drain(records: list[dict]) -> list[list[str]]:
    """Only long tails: a short tail measures the end of the drain, not its rate."""
    uses, tails, seen = [], [], 0
    for record in records:
        for cell in record["cells"]:
            for run in of(cell, "copy-all") if record["series"] == "idle" else []:
                least = least_tail_s(record, cell, run)
                if least and least > 1:
                    seen += 1
                    tails.append(run["tail_s"] / least)
                    uses.append(least / run["tail_s"])
    if not seen:
        return []
    return [
        ["drain: share of the store's bandwidth while files wait", "–", "≥ 0.9", f"{statistics.median(uses):.2f} ({min(uses):.2f} – {max(uses):.2f}) in {seen} runs", verdict(statistics.median(uses) >= 0.9)],
        ["drain: tail ÷ (bytes left ÷ bandwidth + two latencies)", "0.33 % of the run", "≤ 1.05", f"{statistics.median(tails):.2f} ({min(tails):.2f} – {max(tails):.2f})", verdict(statistics.median(tails) <= 1.05)],
    ]


def bandwidth(records: list[dict]) -> list[list[str]]:
    """The tasks' bandwidth under Surgetank, beside that of the tier and of the store."""
    rows = []
    for record, cell, _ in cells(records, "tasks", "copy-all"):
        seen = {variant: [run["told"]["lines"][-1] for run in of(cell, variant)] for variant in ("store", "copy-all", "by-hand")}
        if not all(seen.values()):
            continue
        for way, what in (("write_mib_s", "writes"), ("read_again_mib_s", "reads of the written files")):
            middle = {variant: statistics.median(one[way] for one in lines) for variant, lines in seen.items()}
            share = middle["copy-all"] / middle["by-hand"]
            rows.append([
                f"{what}, {where(record, cell)}", "9 × / 15 ×", "≥ 0.9 of the tier",
                f"{share:.2f} of the tier's {middle['by-hand']:.0f} MiB/s; {middle['copy-all'] / middle['store']:.1f} × the store", verdict(share >= 0.9),
            ])  # fmt: skip
    return rows


def genome(records: list[dict]) -> list[list[str]]:
    rows = []
    for variant in ("in-memory", "copy-all"):
        for record, cell, ratio in cells(records, "genome", variant):
            rows.append([f"{where(record, cell)}, {variant} ÷ store", "2 ×", "≥ 2 ×", f"{ratio} ×", verdict(ratio.median >= 2)])
    return rows


def overheads(records: list[dict]) -> list[list[str]]:
    rows = []
    for record in records:
        for cell in record["cells"] if record["item"] == "overheads" else []:
            lines = [line for run in of(cell, "copy-all") for line in run["told"]["lines"]]
            tasks = sum(line["tasks"] for line in lines)
            task_s, tag_s, locate_s = (sum(line[name] for line in lines) / tasks for name in ("busy_s", "tag_s", "locate_s"))
            agents = (statistics.median(run["cpu_s"]["agent"] for run in of(cell, variant)) for variant in ("copy-all", "in-memory"))
            drain_s = max(0.0, next(agents) - next(agents)) / cell["parameters"]["tasks"]
            share = (tag_s + locate_s + drain_s) / task_s
            what = f"a tag {tag_s * 1e6:.0f} µs, a look-up {locate_s * 1e6:.0f} µs, the drain {drain_s * 1e6:.0f} µs of processor, of a task's {task_s * 1e3:.0f} ms: {share:.1%}"
            rows.append([f"overhead per task, {where(record, cell)}", "6.8 % (66.2 → 70.7 s)", "≤ 2 %", what, verdict(share <= 0.02)])
    return rows


def table(records: list[dict]) -> list[str]:
    """A part of a page; empty without records."""
    rows = [row for part in (in_memory, copy_all, bandwidth, terrain, drain, genome, overheads) for row in part(records)]
    if not rows:
        return []
    head = ["| comparison | paper | target | measured | met |", "|---|---|---|---|---|"]
    return ["## Targets\n", "\n".join(head + [f"| {' | '.join(row)} |" for row in rows]) + "\n"]
