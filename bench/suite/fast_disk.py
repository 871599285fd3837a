"""The table of programs on a fast disk in docs/performance.md. Every number comes from the record of `bench/figures fast-disk`."""

import json
import statistics
import sys
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "results/figures/fast-disk.json"
BEGIN = "<!-- `bench/run report` writes the lines between these marks from bench/results/figures/fast-disk.json -->"
END = "<!-- end of the lines from bench/results/figures/fast-disk.json -->"
HEAD = """| work | plain | under the shim | by the mount |
|---|---|---|---|"""
UNITS = {"us": "µs", "s": "s", "B": "bytes"}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cell(figure: dict) -> str:
    ours = figure["surgetank"]
    return f"{number(statistics.median(ours))} ({number(min(ours))} – {number(max(ours))}), {figure['ratio']:.1f} ×"


def table(record: dict) -> str:
    doors: dict[str, dict[str, dict]] = {}
    for figure in record["figures"]:
        work, _, door = figure["what"].rpartition(", ")
        doors.setdefault(work, {})[door] = figure
    lines = [HEAD]
    for work, by in doors.items():
        plain, unit = by["shim"]["plain"], UNITS[by["shim"]["unit"]]
        lines.append(f"| {work}, {unit} | {number(statistics.median(plain))} ({number(min(plain))} – {number(max(plain))}) | {cell(by['shim'])} | {cell(by['mount'])} |")
    changed = " with local changes" if record["changed"] else ""
    lines += ["", f"{record['machine']}; {record['rounds']} rounds, {record['began']}, commit {record['commit'][:10]}{changed}: `bench/figures fast-disk --rounds {record['rounds']}`."]
    return "\n".join(lines) + "\n"


def load() -> dict:
    return json.loads(RECORD.read_text())


def page(text: str, record: dict) -> str:
    """The text with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        sys.exit(f"docs/performance.md: the marks are missing: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{table(record)}\n{END}{after}"
