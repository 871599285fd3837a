"""The overhead of the system for a task (woss, Table 8). A task sets an attribute on its output and queries its input's location, and
the drain uses processor time. The tasks take 50 ms, and read and write 1 MiB each."""

from dataclasses import replace

from suite.items.cell import Cell, Item
from suite.items.incrementation import workload

CHUNKS, ITERATIONS, COMPUTE_MS = 16, 10, 50


def cells(mode: str) -> list[Cell]:
    chunks, iterations = (4, 3) if mode == "smoke" else (CHUNKS, ITERATIONS)
    work = workload(chunks, 1, iterations, 2, "cpu", COMPUTE_MS)
    work = replace(work, command=(*work.command, "--tagged"))
    parameters = {"tasks": chunks * iterations, "processes": 2, "compute_ms": COMPUTE_MS}
    # In-memory is the same work with almost no drained data, so the difference between the agents is the drain's processor time.
    return [Cell("overheads", f"{chunks * iterations} tasks of {COMPUTE_MS} ms", work, ("in-memory", "copy-all"), "lustre-busy", rounds=3, parameters=parameters)]


ITEM = Item("overheads", cells)
