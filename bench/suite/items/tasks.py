"""N parallel tasks read a file each, then N write one each, and N more read those (PerSSD, Figures 5 to 7). The figures are fio's own
while the tasks run, and the data left for the drain when the last task ends. By-hand shows the bandwidth of the tier."""

from pathlib import Path

from suite.items.cell import MIB, PYTHON, Cell, Item
from suite.variants import Workload

PROGRAM = Path(__file__).resolve().parents[1] / "programs/tasks"


def workload(count: int, file_mib: int) -> Workload:
    def prepare(directory: Path) -> None:
        (directory / "input").mkdir()
        for number in range(count):
            (directory / f"input/{number}").write_bytes(bytes([number]) * (file_mib * MIB))

    return Workload(
        name=f"tasks-{count}x{file_mib}",
        prepare=prepare,
        command=(PYTHON, str(PROGRAM), str(count), str(file_mib)),
        inputs=("input",),
        finals=("output",),
        temporaries=(),
        read_mib=count * file_mib,
        written_mib=count * file_mib,
        final_mib=count * file_mib,
        moved_mib=3 * count * file_mib,
        stages=(
            fio("first"),
            {"name": "read", "tasks": count, "bytes_in": file_mib * MIB, "barrier": True},
            fio("second"),
            {"name": "write", "tasks": count, "bytes_out": file_mib * MIB, "keep_out": True, "barrier": True},
            fio("third"),
            {"name": "again", "tasks": count, "reads": ["write"], "barrier": True},
        ),
    )


def fio(name: str) -> dict:
    """fio's own time for its start and its end: `fio --size=1M --rw=read` with any number of jobs."""
    return {"name": name, "tasks": 1, "cpu_s": 0.14, "wait_s": 0.2, "barrier": True}


def cells(mode: str) -> list[Cell]:
    sizes = {"smoke": [(4, 2)], "headline": [(4, 32)]}.get(mode, [(4, 32), (8, 16), (16, 8), (32, 8), (64, 8)])
    return [
        Cell("tasks", f"{count} tasks of {size} MiB", workload(count, size), ("store", "copy-all", "by-hand"), "lustre-busy", parameters={"tasks": count, "file_mib": size})
        for count, size in sizes
    ]


ITEM = Item("tasks", cells)
