"""Tables and plots, from the records only.

usage: bench/run report [--check]

It writes all of bench/results/REPORT.md, the five figures of docs/performance.md between two marks, and the plots. The first lines of
a plot have a checksum of its numbers, so that `--check` (scripts/tidy) compares the plot with the records without drawing it.
"""

import argparse
import json
import shlex
import sys
import zlib
from pathlib import Path

from suite import claims, expect, fast_disk, plots
from suite.figures import MIB, faster, latest, mean, newest, of, same_cell
from suite.records import load
from suite.statistics import spread
from suite.testbed import CHECKOUT

RESULTS = CHECKOUT / "bench/results"
REPORT = RESULTS / "REPORT.md"
PAGE = CHECKOUT / "docs/performance.md"
PLOTS = CHECKOUT / "docs/plots"
PLOTS_FROM_REPORT = "../../docs/plots"
BEGIN = "<!-- `bench/run report` writes the lines between these marks from bench/results -->"
END = "<!-- end of the lines of `bench/run report` -->"
ORDER = ["store", "copy-all", "in-memory", "by-hand", "overlay"]


def rows(cell: dict, name: str) -> list[str]:
    found: list[str] = []
    for variant in ORDER:
        runs = of(cell, variant)
        if not runs:
            continue
        cpu = {part: mean([run["cpu_s"][part] for run in runs]) for part in ("tasks", "agent", "server")}
        durable = sorted({f"{run['durable_bytes'] / MIB:.0f}" for run in runs})
        words = [
            "" if found else name,
            variant,
            str(len(runs)),
            spread([run["seconds"] for run in runs]),
            str(faster(cell, variant, "store") or ""),
            str(faster(cell, variant, "by-hand") or ""),
            spread([run["tail_s"] for run in runs]).partition(" ")[0],
            " / ".join(durable),
            f"{cpu['tasks']:.2f} + {cpu['agent']:.2f} + {cpu['server']:.2f}",
            direct(cell, runs),
        ]
        found.append("| " + " | ".join(words) + " |")
    return found


def direct(cell: dict, runs: list[dict]) -> str:
    """The share of the programs' bytes that did not pass through the agent."""
    if "agent" not in runs[0]:
        return ""
    mediated = mean([run["agent"]["mediated_bytes"] for run in runs]) / MIB
    return f"{max(0, 1 - mediated / max(cell['moved_mib'], mediated)):.0%}"


HEAD = (
    "| cell | variant | rounds | seconds | speed-up over store | over by-hand | tail, s | MiB durable | CPU s: tasks + agent + server | direct |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def command(record: dict) -> str:
    """The command without --results: that directory does not change the measurement."""
    words = shlex.split(record["command"])
    while "--results" in words:
        at = words.index("--results")
        del words[at : at + 2]
    return shlex.join(words)


def calibration(record: dict) -> str:
    measured = record["calibrations"]

    def between(key: str) -> str:
        values = [one[key] for one in measured]
        return f"{min(values):.0f} – {max(values):.0f}"

    return f"{len(measured)} times: writes {between('write_mib_s')} MiB/s, reads {between('read_mib_s')} MiB/s, look-ups {between('stat_us')} µs"


def conditions(record: dict) -> list[str]:
    loads = [run["load_before"] for cell in record["cells"] for run in cell["runs"]]
    return [
        f"- Command: `{command(record)}`",
        f"- Build: {record['began'][:10]}, {expect.commit(record)}, {record['versions']['surgetank']}",
        f"- Machine: {expect.machine(record)}; load average before each run {min(loads):.1f} – {max(loads):.1f}",
        f"- Store, calibrated {calibration(record)}",
    ]


def section(record: dict, last: dict[tuple[str, ...], str]) -> str:
    kind = "simulated" if record["store"]["simulated"] else "real"
    heading = f"### {record['file']}: {record['item']} on {record['store']['name']} ({kind}), {record['series']}"
    lines = [heading, "", *conditions(record), "", HEAD]
    for cell in record["cells"]:
        old = last[same_cell(record, cell)] != record["began"]
        # The names of some cells already contain "warm".
        warm = cell["cache"] == "warm" and not cell["name"].endswith("warm")
        lines += rows(cell, f"{cell['name']}{', warm' if warm else ''}{', superseded' if old else ''}")
    return "\n".join(lines) + "\n"


WORDS = """<!-- `bench/run report` writes this file from bench/results/*.json. Do not edit it. -->

# Measurements of the suite

Every number comes from the JSON files in this directory. `bench/run report` writes this file, and `scripts/tidy` compares it with the
records. [RECORDS.md](RECORDS.md) has the figures that no JSON file holds. `docs/internals/measuring.md` describes the method.

- Seconds: the median of the rounds (least – most).
- Speed-up: the median of the rounds' ratios, with its 95 % bootstrap interval.
- Memory: all variants of a cell run in a memory cgroup of the same limit. The limit covers page cache and tmpfs.
- Caches: the suite mounts the store again and drops caches before each run. A *warm* cell reads its inputs once before each run instead.
- Clock: the clock stops when the variant's promise holds. The table of variants has the promises.
- Tail: the time from the end of the command to the stop of the clock.
- Direct: the share of the programs' bytes that did not pass through the agent.
- Check: the suite compares the final files of all runs of a cell byte for byte.
- Superseded: a later record measures the same cell. Targets and plots use the later record only.

| variant | promise |
|---|---|
| store | The programs run on the store alone. All files are durable after a sync. |
| copy-all | `surgetank run`. All files are durable and verified at its exit. |
| in-memory | `surgetank run`. The final files are durable and verified at its exit. |
| by-hand | A script keeps intermediate files in memory. It copies and syncs the final files. |
| overlay | As by-hand, with an overlay file system. |
"""


def document(records: list[dict]) -> str:
    """All of REPORT.md."""
    current, last = newest(records), latest(records)
    parts = [WORDS, *claims.table(current)]
    parts += [f"![{plots.TITLES[name]}]({PLOTS_FROM_REPORT}/{name}.svg)\n" for name in plots.wanted(current)]
    parts += ["## Records\n", *(section(record, last) for record in records)]
    return "\n".join(parts)


def page(text: str, records: list[dict]) -> str:
    """The text with the five figures between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        sys.exit(f"{PAGE}: the marks are missing: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{expect.table(records)}\n{END}{after}"


def drawn_from(numbers: object) -> str:
    return f"<!-- drawn from numbers with the CRC-32 {zlib.crc32(json.dumps(numbers, sort_keys=True).encode()):08x} -->"


def differing(texts: dict[Path, str]) -> list[str]:
    """A complaint about each file that does not have its text."""
    return [
        f"{file.relative_to(CHECKOUT)}: differs from the text that bench/results gives"
        for file, text in texts.items()
        if not file.exists() or file.read_text() != text
    ]


def differing_plots(pictures: dict[str, object]) -> list[str]:
    wrong = []
    for name, numbers in pictures.items():
        file = PLOTS / f"{name}.svg"
        if not file.exists() or drawn_from(numbers) not in file.read_text():
            wrong.append(f"{file.relative_to(CHECKOUT)}: not drawn from the numbers of bench/results")
    return wrong + [f"{file.relative_to(CHECKOUT)}: no record in bench/results gives this plot" for file in PLOTS.glob("*.svg") if file.stem not in pictures]


def write(texts: dict[Path, str], pictures: dict[str, object]) -> None:
    for file, text in texts.items():
        file.write_text(text)
    PLOTS.mkdir(exist_ok=True)
    for file in PLOTS.glob("*.svg"):
        if file.stem not in pictures:
            file.unlink()
    for name, numbers in pictures.items():
        (PLOTS / f"{name}.svg").write_text(plots.draw(name, numbers, drawn_from(numbers)))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args(argv)
    records = load(RESULTS)
    texts = {REPORT: document(records), PAGE: fast_disk.page(page(PAGE.read_text(), records), fast_disk.load())}
    pictures = plots.wanted(newest(records))
    if not words.check:
        write(texts, pictures)
        print(f"{', '.join(str(file.relative_to(CHECKOUT)) for file in texts)} and {len(pictures)} plots, from {len(records)} records")
        return 0
    if wrong := differing(texts) + differing_plots(pictures):
        print("\n".join([*wrong, "run: bench/run report"]), file=sys.stderr)
        return 1
    print(f"report: {len(records)} records, {len(pictures)} plots")
    return 0
