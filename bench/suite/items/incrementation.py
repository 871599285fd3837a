"""Incrementation (Sea, Algorithm 1) reads, increments and saves all of the data n times. This item varies the parameters of Sea's Figure
2 except nodes: iterations, processes, devices of the tier, and the intermediate data's size relative to the tier.

Sizes depend on the store, so that a run straight on it takes about the same time on each.
"""

from pathlib import Path

from presets import PRESETS
from suite.items.cell import FULL_ROUNDS, GIB, HEADLINE_ROUNDS, MIB, PYTHON, Cell, Item
from suite.variants import Tier, Workload

PROGRAM = Path(__file__).resolve().parents[1] / "programs/increment"
HEADER_BYTES = 128  # of an .npy file


def workload(chunks: int, chunk_mib: float, iterations: int, processes: int = 2, compute: str = "none", compute_ms: float = 0) -> Workload:
    def prepare(directory: Path) -> None:
        import numpy

        (directory / "input").mkdir()
        chance = numpy.random.default_rng(1)
        for number in range(chunks):
            # As Sea's histology images: 16 bits a voxel.
            voxels = chance.integers(0, 60_000, round(chunk_mib * MIB) // 2 - HEADER_BYTES // 2, dtype=numpy.uint16)
            numpy.save(directory / f"input/{number:03}.npy", voxels)

    data = chunks * chunk_mib
    words = (PYTHON, str(PROGRAM), "--iterations", str(iterations), "--processes", str(processes))
    return Workload(
        name=f"increment-{chunks}x{chunk_mib}",
        prepare=prepare,
        command=(*words, "--compute", compute, "--compute-ms", f"{compute_ms:.0f}"),
        inputs=("input",),
        finals=("final",),
        temporaries=("work/**",),
        read_mib=data,
        written_mib=data * iterations,
        final_mib=data,
        moved_mib=2 * data * iterations,
        compute_s=compute_ms / 1000 * chunks * iterations / processes,
        # One thread a process, because the item varies the workload's own parallelism.
        environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stages=(
            # One process loads numpy first.
            {"name": "start", "tasks": 1, "cpu_s": 0.1},
            {
                "name": "inc",
                "tasks": chunks,
                "bytes_in": round(chunk_mib * MIB),
                "bytes_out": round(chunk_mib * MIB),
                "iterations": iterations,
                "reread": True,
                "cpu_s": 0.002 + (compute_ms / 1000 if compute == "cpu" else 0),
                "wait_s": compute_ms / 1000 if compute == "sleep" else 0,
                "barrier": True,
            },
        ),
    )


def cell(name: str, work: Workload, preset: str, variants: tuple[str, ...], **conditions) -> Cell:
    return Cell("incrementation", name, work, variants, preset, **conditions)


# MiB of data for which ten iterations take 6 to 10 s straight on the store.
DATA_MIB = {"lustre-busy": 32, "nfs": 72, "lustre-idle": 128}
LIMIT = ("store", "in-memory", "by-hand")


def iterations(preset: str, count: int, variants: tuple[str, ...] = LIMIT, **conditions) -> Cell:
    work = workload(8, DATA_MIB[preset] / 8, count)
    parameters = {"iterations": count, "processes": 2, "data_mib": DATA_MIB[preset]}
    return cell(f"{count} iterations", work, preset, variants, parameters=parameters, **conditions)


def computing(preset: str, how: str, processes: int, **conditions) -> Cell:
    """Computing takes as long as the transfer of its results."""
    chunk_mib, count = 48 / processes, 12
    milliseconds = 1000 * chunk_mib * processes / PRESETS[preset].bandwidth_mib_s
    work = workload(processes, chunk_mib, count, processes, how, milliseconds)
    cores = {"cpu": f"computing on {processes} of 2 cores", "sleep": f"{processes} sleeping"}[how]
    parameters = {"iterations": count, "processes": processes, "compute": how, "compute_ms": round(milliseconds), "data_mib": 48}
    return cell(f"copy-all, {cores}", work, preset, ("store", "copy-all"), parameters=parameters, **conditions)


def copying(preset: str, **conditions) -> Cell:
    work = workload(8, DATA_MIB[preset] / 8, 8)
    parameters = {"iterations": 8, "processes": 2, "data_mib": DATA_MIB[preset]}
    return cell("copy-all, no computing", work, preset, ("store", "copy-all"), parameters=parameters, **conditions)


def cells(mode: str) -> list[Cell]:
    if mode == "smoke":
        small = workload(4, 1, 5)
        return [
            cell("5 iterations", small, "lustre-busy", ("store", "in-memory", "copy-all", "by-hand", "overlay"), parameters={"iterations": 5}),
            cell("5 iterations, warm", small, "lustre-busy", ("store", "in-memory"), warm=True, parameters={"iterations": 5}),
            cell("5 iterations", small, "nfs", ("store", "copy-all"), series="loaded", parameters={"iterations": 5}),
        ]
    if mode == "headline":
        ten = {"rounds": HEADLINE_ROUNDS}
        return [
            iterations("lustre-busy", 1, ("store", "in-memory"), **ten),
            iterations("lustre-busy", 3, ("store", "in-memory"), **ten),
            iterations("lustre-busy", 10, **ten),
            copying("lustre-busy", **ten),
            iterations("nfs", 10, **ten),
            computing("nfs", "cpu", 1, **ten),
            iterations("lustre-idle", 10, **ten),
        ]
    found = []
    for preset in DATA_MIB:
        found.append(iterations(preset, 10, (*LIMIT, "overlay"), rounds=HEADLINE_ROUNDS))
        found.append(copying(preset, rounds=HEADLINE_ROUNDS))
    busy = "lustre-busy"
    found += [iterations(busy, count, LIMIT, rounds=FULL_ROUNDS) for count in (1, 2, 3, 5, 15)]
    found += [iterations(busy, 10, ("store", "in-memory"), series="loaded")]
    warm = iterations(busy, 5, LIMIT, warm=True)
    found.append(Cell(**{**vars(warm), "name": "5 iterations, warm"}))
    for processes in (1, 4, 8):
        work = workload(8, 4, 5, processes)
        found.append(cell(f"5 iterations, {processes} processes", work, busy, LIMIT, parameters={"iterations": 5, "processes": processes, "data_mib": 32}))
    for devices in (2, 4):
        work = workload(8, 4, 5)
        found.append(cell(f"5 iterations, {devices} devices", work, busy, ("store", "in-memory"), tier=Tier(2 * GIB, devices), parameters={"iterations": 5, "devices": devices, "data_mib": 32}))
    # The intermediate data (192 MiB) relative to the tier.
    for share in (2.0, 1.0, 0.5, 0.25):
        work = workload(8, 4, 7)
        parameters = {"iterations": 7, "tier_to_intermediate": share, "data_mib": 32}
        found.append(cell(f"7 iterations, tier {share:g} × intermediate", work, busy, ("store", "in-memory"), tier=Tier(round(192 * MIB * share)), parameters=parameters))
    # All written data (768 MiB) relative to the memory that page cache and tmpfs share.
    for limit_mib in (2048, 1024, 512):
        work = workload(12, 8, 8)
        parameters = {"iterations": 8, "memory_mib": limit_mib, "data_mib": 96}
        found.append(
            cell(f"8 iterations, {limit_mib} MiB of memory", work, "nfs", ("store", "in-memory", "copy-all"), memory_bytes=limit_mib * MIB,
                 tier=Tier(limit_mib * MIB // 2), parameters=parameters)
        )  # fmt: skip
    for how, processes in (("cpu", 1), ("cpu", 2), ("sleep", 2)):
        found.append(computing("nfs", how, processes, rounds=HEADLINE_ROUNDS if how == "cpu" else FULL_ROUNDS))
    return found


ITEM = Item("incrementation", cells, "not varied: nodes (there is one); devices of a tier share this machine's memory")
