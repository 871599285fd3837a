"""The plots of the records, their numbers, and their drawing (only the drawing needs matplotlib)."""

import io
import statistics

from suite.statistics import paired_ratio

TITLES = {
    "speeds": "Incrementation, 10 iterations: speed-up over the store alone, on three stores",
    "iterations": "Incrementation: time by number of steps, on lustre-busy (simulated)",
    "terrain": "Terrain: time by size, on nfs (simulated)",
    "tasks": "Parallel tasks: bandwidth of the tasks, and the drain's tail",
}


def median(cell: dict, variant: str) -> float | None:
    found = [run["seconds"] for run in cell["runs"] if run["variant"] == variant]
    return round(statistics.median(found), 4) if found else None


def cells(records: list[dict], item: str, series: str = "idle") -> list[tuple[dict, dict]]:
    return [(record, cell) for record in records if record["item"] == item and record["series"] == series for cell in record["cells"]]


def speeds(records: list[dict]) -> list:
    found = []
    for record, cell in cells(records, "incrementation"):
        if cell["name"] != "10 iterations" or not record["store"]["simulated"]:
            continue
        rounds = {name: [run["seconds"] for run in cell["runs"] if run["variant"] == name] for name in ("store", "in-memory", "by-hand")}
        if not all(rounds.values()):
            continue
        points = {}
        for name in ("in-memory", "by-hand"):
            ratio = paired_ratio(rounds["store"], rounds[name])
            points[name] = [round(value, 4) for value in (ratio.median, ratio.low, ratio.high)]
        found.append([record["store"]["preset"]["bandwidth_mib_s"], record["store"]["name"], points])
    return sorted(found, key=lambda point: point[:2])


def lines_by(records: list[dict], item: str, parameter: str, store: str, only: set[str], fixed: dict[str, object] | None = None) -> dict[str, list]:
    """Variant → points, of cells with the parameters `only`, and with the values `fixed`."""
    found: dict[str, list] = {}
    for record, cell in cells(records, item):
        if record["store"]["name"] != store or set(cell["parameters"]) - only or parameter not in cell["parameters"] or cell["cache"] == "warm":
            continue
        if any(cell["parameters"].get(name) != value for name, value in (fixed or {}).items()):
            continue
        for variant in dict.fromkeys(run["variant"] for run in cell["runs"]):
            found.setdefault(variant, []).append([cell["parameters"][parameter], median(cell, variant)])
    return {variant: sorted(points) for variant, points in found.items() if len(points) > 1}


def tasks(records: list[dict]) -> dict[str, list]:
    found: dict[str, list] = {}
    for _, cell in cells(records, "tasks"):
        for variant in ("store", "copy-all", "by-hand"):
            runs = [run for run in cell["runs"] if run["variant"] == variant and run.get("told")]
            if runs:
                lines = [run["told"]["lines"][-1] for run in runs]
                values = [statistics.median(one[way] for one in lines) for way in ("read_mib_s", "write_mib_s")]
                found.setdefault(variant, []).append([cell["parameters"]["tasks"], *values, statistics.median(run["tail_s"] for run in runs)])
    return {variant: sorted(points) for variant, points in found.items() if len(points) > 1}


def wanted(records: list[dict]) -> dict[str, object]:
    found = {
        "speeds": speeds(records),
        "iterations": lines_by(
            records, "incrementation", "iterations", "lustre-busy", {"iterations", "processes", "data_mib"}, {"processes": 2}
        ),
        "terrain": lines_by(records, "terrain", "pixels", "nfs", {"pixels", "tiles"}),
        "tasks": tasks(records),
    }
    return {name: numbers for name, numbers in found.items() if len(numbers) > (1 if name == "speeds" else 0)}


def draw(name: str, numbers, comment: str) -> str:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": name, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, 2 if name == "tasks" else 1, figsize=(7.2, 3.2), layout="constrained", squeeze=False)
    first = axes[0][0]
    if name == "speeds":
        for variant in ("in-memory", "by-hand"):
            points = [(bandwidth, *found[variant]) for bandwidth, _, found in numbers]
            x, middle, low, high = zip(*points)
            errors = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
            first.errorbar(x, middle, yerr=errors, marker="o", capsize=3, label=variant)
        for bandwidth, store, _ in numbers:
            first.annotate(store, (bandwidth, 0), xytext=(0, 4), textcoords="offset points", ha="center")
        first.axhline(1, color="grey", linewidth=0.8)
        first.set(xlabel="bandwidth of the store, MiB/s (simulated)", ylabel="speed-up over the store alone", ylim=(0, None))
    elif name == "tasks":
        for variant, points in numbers.items():
            count, read, write, tail = zip(*points)
            first.plot(count, read, marker="o", label=f"{variant}, read")
            first.plot(count, write, marker="s", linestyle="--", label=f"{variant}, write")
            axes[0][1].plot(count, tail, marker="o", label=variant)
        first.set(xlabel="tasks", ylabel="MiB/s, sum of the tasks", xscale="log", yscale="log")
        axes[0][1].set(xlabel="tasks", ylabel="tail, s", ylim=(0, None))
        axes[0][1].legend(frameon=False)
    else:
        for variant, points in numbers.items():
            first.plot(*zip(*points), marker="o", label=variant)
        first.set(xlabel={"iterations": "steps", "terrain": "pixels, each way"}[name], ylabel="seconds, until durable", ylim=(0, None))
    first.legend(frameon=False)
    figure.suptitle(TITLES[name], fontsize=10)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    head, mark, rest = text.getvalue().partition("?>\n")
    return head + mark + comment + "\n" + "\n".join(line.rstrip() for line in rest.splitlines()) + "\n"
