"""What a task pays for what the system does beside it (woss, Table 8): an attribute set on what it wrote, the question where its input
is, and the processor time of the drain. Seen by tasks of 50 ms that read and write 1 MiB each."""

from dataclasses import replace

from suite.items.cell import Cell, Item
from suite.items.incrementation import workload

CHUNKS, ITERATIONS, COMPUTE_MS = 16, 10, 50


def cells(mode: str) -> list[Cell]:
    chunks, iterations = (4, 3) if mode == "smoke" else (CHUNKS, ITERATIONS)
    work = workload(chunks, 1, iterations, 2, "cpu", COMPUTE_MS)
    work = replace(work, command=(*work.command, "--tagged"))
    parameters = {"tasks": chunks * iterations, "processes": 2, "compute_ms": COMPUTE_MS}
    # In-memory is the same work of which next to nothing is drained: the difference of the agents is the drain's.
    return [Cell("overheads", f"{chunks * iterations} tasks of {COMPUTE_MS} ms", work, ("in-memory", "copy-all"), "lustre-busy", rounds=3, parameters=parameters)]


ITEM = Item("overheads", cells)
