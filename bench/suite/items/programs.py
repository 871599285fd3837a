"""The programs of bench/workloads: blocks of fio and a pair of MPI jobs (burst-buffers, Figures 4 and 5), many tiny files (Figure 7),
Montage and BLAST (woss, Tables 5 and 7). What each reads, writes and keeps it says itself (`describe`)."""

import json
import subprocess
from pathlib import Path

from suite.items.cell import FULL_ROUNDS, HEADLINE_ROUNDS, MIB, PYTHON, Cell, Item
from suite.testbed import CHECKOUT, words
from suite.variants import Workload

FOLDER = CHECKOUT / "bench/workloads"


def workload(name: str, size: str, compute_s: float) -> Workload:
    program = str(FOLDER / name)
    told = json.loads(words(PYTHON, program, "describe", "--size", size))

    def prepare(directory: Path) -> None:
        subprocess.run([PYTHON, program, "inputs", directory, "--size", size], check=True)

    def patterns(which: str) -> tuple[str, ...]:
        return tuple(pattern.removeprefix("/") for pattern in told[which])

    written = sum(stage["bytes_out"] for stage in told["stages"])
    read = sum(stage["bytes_read"] for stage in told["stages"])
    return Workload(
        name=f"{name}-{size}",
        prepare=prepare,
        command=(PYTHON, program, "run", ".", "--size", size),
        inputs=tuple(dict.fromkeys(pattern.partition("/")[0] for pattern in patterns("inputs"))),
        finals=patterns("final"),
        temporaries=tuple(told["intermediate"]),
        # What is read twice is in the page cache the second time.
        read_mib=told["stages"][0]["bytes_in"] / MIB,
        written_mib=written / MIB,
        final_mib=told["stages"][-1]["bytes_out"] / MIB,
        moved_mib=(read + written) / MIB,
        compute_s=compute_s,
    )


def item(name: str, sizes: dict[str, list[tuple[str, float]]], variants: tuple[str, ...], preset: str = "lustre-busy", rounds: int = FULL_ROUNDS) -> Item:
    """Sizes for each mode, and about how long all of it computes."""

    def cells(mode: str) -> list[Cell]:
        return [
            Cell(name, f"{name}, {size}", workload(name, size, compute_s), variants, preset, rounds=rounds, parameters={"size": size})
            for size, compute_s in sizes.get(mode, [])
        ]

    return Item(name, cells)


INTERMEDIATES = ("store", "copy-all", "in-memory")
ITEMS = [
    item("genome", {"smoke": [("smoke", 1)], "headline": [("small", 5)], "full": [("small", 5)]}, INTERMEDIATES, rounds=HEADLINE_ROUNDS),
    item("sweep", {"smoke": [("smoke", 0)], "full": [("16x4", 0), ("32x8", 0), ("16x32", 0)]}, ("store", "copy-all")),
    item("cybershake", {"smoke": [("smoke", 1)], "full": [("small", 3)]}, INTERMEDIATES),
    item("montage", {"smoke": [("smoke", 3)], "full": [("small", 15)]}, INTERMEDIATES),
    item("blast", {"smoke": [("smoke", 3)], "full": [("small", 10)]}, ("store", "copy-all")),
]
