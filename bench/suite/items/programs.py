"""The programs of bench/workloads: blocks of fio and a pair of MPI jobs (burst-buffers, Figures 4 and 5), many tiny files (Figure 7),
Montage and BLAST (woss, Tables 5 and 7). Each program itself describes the files that it reads, writes and keeps (`describe`)."""

import json
import os
import subprocess
import time
from pathlib import Path

from suite.items.cell import FULL_ROUNDS, HEADLINE_ROUNDS, MIB, PYTHON, Cell, Item
from suite.testbed import CHECKOUT, words
from suite.variants import Workload

FOLDER = CHECKOUT / "bench/workloads"


def described(directory: Path, program: str, size: str, description: dict) -> tuple[dict, ...]:
    """Its stages for `surgetank model`: files and bytes from its own description, the time of a task from one run in memory."""

    def matching(patterns: list[str]) -> list[int]:
        return [path.stat().st_size for pattern in patterns for path in directory.glob(pattern.removeprefix("/"))]

    given = {stage["stage"]: matching([pattern for pattern in stage["reads"] if pattern in description["inputs"]]) for stage in description["stages"]}
    before, began = os.times(), time.monotonic()
    lines = words(PYTHON, program, "run", str(directory), "--size", size).splitlines()
    whole_s, after = time.monotonic() - began, os.times()
    took = {line["stage"]: line["seconds"] for line in map(json.loads, lines)}
    processes = description["processes"]
    lived = sum(seconds * min(stage["tasks"], processes) for stage in description["stages"] for seconds in [took[stage["stage"]]])
    computing = after.children_user + after.children_system - before.children_user - before.children_system
    share = min(1.0, computing / (lived + whole_s - sum(took.values())))
    stages = [{"name": "start", "tasks": 1, "cpu_s": max(0.0, whole_s - sum(took.values()))}]
    for stage in description["stages"]:
        tasks, inputs = stage["tasks"], given[stage["stage"]]
        task_s = took[stage["stage"]] * min(tasks, processes) / tasks
        # If a stage has fewer files than tasks, all of its tasks read the same files.
        each = 1 if len(inputs) < tasks else tasks
        stages.append({
            "name": stage["stage"], "tasks": tasks, "barrier": True, "cpu_s": task_s * share, "wait_s": task_s * (1 - share),
            "shared_in": each == 1, "files_in": max(1, len(inputs) // each), "bytes_in": sum(inputs) // each,
            "reads": [other["stage"] for other in description["stages"] if set(other["writes"]) & set(stage["reads"])],
            "files_out": max(1, stage["files_out"] // tasks), "bytes_out": stage["bytes_out"] // tasks,
            "keep_out": any(pattern in description["final"] for pattern in stage["writes"]),
        })  # fmt: skip
    return tuple(stages)


def workload(name: str, size: str, compute_s: float) -> Workload:
    program = str(FOLDER / name)
    description = json.loads(words(PYTHON, program, "describe", "--size", size))

    def prepare(directory: Path) -> None:
        subprocess.run([PYTHON, program, "inputs", directory, "--size", size], check=True)

    def patterns(which: str) -> tuple[str, ...]:
        return tuple(pattern.removeprefix("/") for pattern in description[which])

    written = sum(stage["bytes_out"] for stage in description["stages"])
    read = sum(stage["bytes_read"] for stage in description["stages"])
    return Workload(
        name=f"{name}-{size}",
        prepare=prepare,
        command=(PYTHON, program, "run", ".", "--size", size),
        inputs=tuple(dict.fromkeys(pattern.partition("/")[0] for pattern in patterns("inputs"))),
        finals=patterns("final"),
        temporaries=tuple(description["intermediate"]),
        # The second read of a file comes from the page cache.
        read_mib=description["stages"][0]["bytes_in"] / MIB,
        written_mib=written / MIB,
        final_mib=description["stages"][-1]["bytes_out"] / MIB,
        moved_mib=(read + written) / MIB,
        compute_s=compute_s,
        describe=lambda directory: described(directory, program, size, description),
    )


def item(name: str, sizes: dict[str, list[tuple[str, float]]], variants: tuple[str, ...], preset: str = "lustre-busy", rounds: int = FULL_ROUNDS) -> Item:
    """Sizes for each mode, and the approximate time of all computing."""

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
