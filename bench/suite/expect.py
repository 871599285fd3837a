"""The five figures of docs/performance.md: their cells, and their form in the page.

The work of a figure is described here. Every number comes from the newest record that has the cell.
"""

import shlex
import sys
from dataclasses import dataclass

from suite.figures import GIB, faster, newest, seconds
from suite.statistics import spread


@dataclass(frozen=True)
class Figure:
    work: str
    item: str
    store: str
    cell: str
    variant: str


FIGURES = (
    Figure("Ten steps. Each step reads the files of the step before", "incrementation", "lustre-busy", "10 iterations", "in-memory"),
    Figure("A mosaic of the sky by Montage", "montage", "lustre-busy", "montage, small", "copy-all"),
    Figure("Steps that compute and write", "incrementation", "nfs", "copy-all, computing on 1 of 2 cores", "copy-all"),
    Figure("Steps that only read and write", "incrementation", "lustre-busy", "copy-all, no computing", "copy-all"),
    Figure("Thousands of files of a few KiB each", "genome", "lustre-busy", "genome, small", "copy-all"),
)
DRAINED = {"in-memory": "final", "copy-all": "all"}

HEAD = """| | work | drained files | store alone, s | with Surgetank, s | speed-up |
|---|---|---|---|---|---|"""


def found(figure: Figure, records: list[dict]) -> tuple[dict, dict]:
    """The record and the cell of a figure."""
    for record in newest(records):
        if (record["item"], record["store"]["name"], record["series"]) == (figure.item, figure.store, "idle"):
            for cell in record["cells"]:
                if cell["name"] == figure.cell and faster(cell, figure.variant, "store"):
                    return record, cell
    sys.exit(f"bench/results: no record has {figure.variant} of {figure.cell!r} ({figure.item} on {figure.store})")


def row(number: int, figure: Figure, cell: dict) -> str:
    words = [
        str(number),
        figure.work,
        DRAINED[figure.variant],
        spread(seconds(cell, "store")),
        spread(seconds(cell, figure.variant)),
        f"{faster(cell, figure.variant, 'store')} ×",
    ]
    return f"| {' | '.join(words)} |"


def again(figure: Figure) -> str:
    """The command that measures this figure."""
    return shlex.join(["bench/run", figure.item, "--preset", figure.store, "--series", "idle", "--cell", figure.cell])


def commit(record: dict) -> str:
    return f"commit {record['git']['commit'][:10]}{' with local changes' if record['git']['changed'] else ''}"


def machine(record: dict) -> str:
    """Without the part of the kernel's name that only one machine has."""
    one = record["machine"]
    return f"{one['cores']} cores, {one['memory_bytes'] / GIB:.1f} GiB of memory, Linux {one['kernel'].partition('-')[0]}"


def conditions(number: int, figure: Figure, record: dict, cell: dict) -> str:
    preset = record["store"]["preset"]
    facts = [
        f"`{figure.store}` with {preset['bandwidth_mib_s']} MiB/s and {preset['latency_us']} µs",
        f"{cell['memory_limit_bytes'] / GIB:.0f} GiB memory limit",
        f"{len(seconds(cell, figure.variant))} rounds",
        record["began"][:10],
        commit(record),
    ]
    return f"{number}. {', '.join(facts)}:\n   `{again(figure)}`"


def table(records: list[dict]) -> str:
    """The part of the page between its marks."""
    measured = [(number, figure, *found(figure, records)) for number, figure in enumerate(FIGURES, 1)]
    machines = dict.fromkeys(machine(record) for _, _, record, _ in measured)
    lines = [HEAD, *(row(number, figure, cell) for number, figure, _, cell in measured), ""]
    lines += [f"Machine: {'; '.join(machines)}. Conditions and command of each figure:", ""]
    lines += [conditions(*one) for one in measured]
    return "\n".join(lines) + "\n"
