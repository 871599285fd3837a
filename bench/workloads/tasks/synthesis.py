"""Second job of the pair, under mpirun: each rank reads its part of both large files and computes the convolutions for the ruptures
near its points. Rank 0 gathers the seismograms and writes four small files a rupture.

usage: synthesis.py POINTS RUPTURES
"""

import os
import sys

import numpy as np
from mpi4py import MPI
from tensors import COMPONENTS, ROW_BYTES, STEPS, names, ruptured, slip, span

PIECE_BYTES = 4 << 20


def part(everybody: MPI.Comm, name: str, first: int, end: int) -> np.ndarray:
    held = np.empty((end - first, STEPS), dtype="<f4")
    flat = held.reshape(-1).view("u1")
    file = MPI.File.Open(everybody, name, MPI.MODE_RDONLY)
    for offset in range(0, flat.size, PIECE_BYTES):
        file.Read_at(first * ROW_BYTES + offset, flat[offset : offset + PIECE_BYTES])
    file.Close()
    return held


def write(rupture: int, seismogram: np.ndarray) -> None:
    x, y = seismogram
    contents = [x.tobytes(), y.tobytes(), f"{np.hypot(x, y).max():.6e}\n".encode(), f"{significant(x)} {significant(y)}\n".encode()]
    for name, content in zip(names(rupture), contents, strict=True):
        with open(name, "wb") as file:
            file.write(content)


def significant(samples: np.ndarray) -> int:
    """Steps between 5 and 95 % of the energy."""
    energy = np.cumsum(samples.astype("f8") ** 2)
    low, high = np.searchsorted(energy, energy[-1] * np.array([0.05, 0.95]))
    return int(high - low)


def main(points: int, ruptures: int) -> None:
    everybody = MPI.COMM_WORLD
    first, end = span(everybody.rank, everybody.size, points)
    if everybody.rank == 0:
        for folder in sorted({os.path.dirname(names(rupture)[0]) for rupture in range(ruptures)}):
            os.makedirs(folder, exist_ok=True)
    held = [part(everybody, name, first, end) for name in COMPONENTS]
    mine = [rupture for rupture in range(ruptures) if first <= ruptured(rupture, ruptures, points) < end]
    for rupture in mine:
        course = slip(rupture)
        point = ruptured(rupture, ruptures, points) - first
        seismogram = np.stack([np.convolve(component[point], course)[:STEPS] for component in held])
        if everybody.rank:
            everybody.Send(seismogram, dest=0, tag=rupture)
        else:
            write(rupture, seismogram)
    if everybody.rank == 0:
        came, where = np.empty((2, STEPS), dtype="<f4"), MPI.Status()
        for _ in range(ruptures - len(mine)):
            everybody.Recv(came, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=where)
            write(where.tag, came)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
