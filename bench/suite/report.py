"""Tables and plots of docs/, from the records and from nothing else.

usage: bench/run report [--check]

The tables stand in docs/performance.md between two marks; a plot has in its first lines a checksum of the numbers that it was drawn
from, so that both can be compared with the records where nothing can be drawn (`--check`, which scripts/tidy does).
"""

import argparse
import json
import sys
import zlib
from pathlib import Path

from suite import claims, plots
from suite.records import load
from suite.figures import MIB, faster, mean, of
from suite.statistics import spread
from suite.testbed import CHECKOUT

RESULTS = CHECKOUT / "bench/results"
PAGE = CHECKOUT / "docs/performance.md"
PLOTS = CHECKOUT / "docs/plots"
BEGIN = "<!-- bench/run report: what is between these marks is written by it, from bench/results -->"
END = "<!-- bench/run report: end -->"
ORDER = ["store", "copy-all", "in-memory", "by-hand", "overlay"]


def rows(record: dict, cell: dict) -> list[str]:
    found: list[str] = []
    for variant in ORDER:
        runs = of(cell, variant)
        if not runs:
            continue
        cpu = {who: mean([run["cpu_s"][who] for run in runs]) for who in ("tasks", "agent", "server")}
        durable = sorted({f"{run['durable_bytes'] / MIB:.0f}" for run in runs})
        direct = ""
        if "agent" in runs[0]:
            mediated = mean([run["agent"]["mediated_bytes"] for run in runs]) / MIB
            direct = f"{max(0, 1 - mediated / max(cell['moved_mib'], mediated)):.0%}"
        words = [
            f"{cell['name']}, {cell['cache']}" if not found else "",
            variant,
            spread([run["seconds"] for run in runs]),
            str(faster(cell, variant, "store") or ""),
            str(faster(cell, variant, "by-hand") or ""),
            spread([run["tail_s"] for run in runs]).partition(" ")[0],
            " / ".join(durable),
            f"{cpu['tasks']:.2f} + {cpu['agent']:.2f} + {cpu['server']:.2f}",
            direct,
        ]
        found.append("| " + " | ".join(words) + " |")
    return found


HEAD = (
    "| | | seconds | × the store's speed | × by hand's | tail, s | MiB durable | CPU s: tasks + agent + server | direct |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def section(record: dict) -> str:
    store, machine = record["store"], record["machine"]
    kind = "simulated" if store["simulated"] else "real"
    measured = record["calibrations"]
    lows = [min(one[key] for one in measured) for key in ("write_mib_s", "read_mib_s", "stat_us")]
    highs = [max(one[key] for one in measured) for key in ("write_mib_s", "read_mib_s", "stat_us")]
    loads = [run["load_before"] for cell in record["cells"] for run in cell["runs"]]
    lines = [
        f"### {record['item']} on {store['name']} ({kind}), {record['series']}",
        "",
        f"`{record['command']}`, {record['began'][:10]}, commit {record['git']['commit'][:10]}{' and changes' if record['git']['changed'] else ''}; "
        f"{machine['cores']} cores, Linux {machine['kernel']}, {record['versions']['surgetank']}; load average before each run {min(loads):.1f} – {max(loads):.1f}. "
        f"Calibrated {len(measured)} times: writes {lows[0]:.0f} – {highs[0]:.0f} MiB/s, reads {lows[1]:.0f} – {highs[1]:.0f} MiB/s, a look-up {lows[2]:.0f} – {highs[2]:.0f} µs.",
        "",
        HEAD,
    ]
    for cell in record["cells"]:
        lines += rows(record, cell)
    return "\n".join(lines) + "\n"


WORDS = """Median of the rounds (least – most); ratios are medians of the rounds' own ratios, with their 95 % bootstrap interval. All variants of a
row are in a memory cgroup of the same limit, which covers page cache and tmpfs; *cold*: the store is mounted anew and caches are dropped
before each run. The clock stops when what the variant promises is durable: **store**, everything, after a sync; **copy-all** and
**in-memory** (`surgetank run`), everything and the final files, verified, at its exit; **by-hand**, intermediates in memory, final files
copied and synced: the limit; **overlay** likewise. *Tail*: from the end of the command to there. *Direct*: share of the programs' bytes that did
not pass through the agent. Final files are compared, byte for byte, among all runs of a row.
"""


def tables(records: list[dict]) -> str:
    parts = [WORDS, *claims.table(records)]
    for name in plots.wanted(records):
        parts.append(f"![{plots.TITLES[name]}](plots/{name}.svg)\n")
    parts += [section(record) for record in records]
    return "\n".join(parts)


def page(text: str, records: list[dict]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        sys.exit(f"{PAGE}: the marks are missing: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{tables(records)}\n{END}{after}"


def drawn_from(numbers: object) -> str:
    return f"<!-- drawn from numbers with the CRC-32 {zlib.crc32(json.dumps(numbers, sort_keys=True).encode()):08x} -->"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args(argv)
    records = load(RESULTS)
    text = PAGE.read_text()
    wanted = page(text, records)
    wrong = []
    if text != wanted:
        wrong.append(f"{PAGE.relative_to(CHECKOUT)}: not what bench/results gives")
    pictures = plots.wanted(records)
    for name, numbers in pictures.items():
        file = PLOTS / f"{name}.svg"
        if not file.exists() or drawn_from(numbers) not in file.read_text():
            wrong.append(f"{file.relative_to(CHECKOUT)}: not drawn from what bench/results gives")
    wrong += [f"{file.relative_to(CHECKOUT)}: nothing in bench/results gives it" for file in PLOTS.glob("*.svg") if file.stem not in pictures]
    if words.check:
        print("\n".join(wrong) or f"report: {len(records)} records, {len(pictures)} plots", file=sys.stderr if wrong else sys.stdout)
        if wrong:
            print("run: bench/run report", file=sys.stderr)
        return 1 if wrong else 0
    PAGE.write_text(wanted)
    PLOTS.mkdir(exist_ok=True)
    for file in PLOTS.glob("*.svg"):
        if file.stem not in pictures:
            file.unlink()
    for name, numbers in pictures.items():
        (PLOTS / f"{name}.svg").write_text(plots.draw(name, numbers, drawn_from(numbers)))
    print(f"{PAGE.relative_to(CHECKOUT)} and {len(pictures)} plots, from {len(records)} records")
    return 0
