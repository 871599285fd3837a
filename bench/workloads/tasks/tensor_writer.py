"""First job of the pair, under mpirun: all ranks write two large files together (MPI-IO), each rank its own points.

usage: tensor_writer.py POINTS
"""

import sys

from mpi4py import MPI
from tensors import COMPONENTS, ROW_BYTES, rows, span

POINTS_AT_A_TIME = 1024


def main(points: int) -> None:
    everybody = MPI.COMM_WORLD
    first, end = span(everybody.rank, everybody.size, points)
    # All ranks must take part in a collective write, also those that have written all of their own data.
    turns = max(-(-(b - a) // POINTS_AT_A_TIME) for a, b in (span(rank, everybody.size, points) for rank in range(everybody.size)))
    for component, name in enumerate(COMPONENTS):
        file = MPI.File.Open(everybody, name, MPI.MODE_CREATE | MPI.MODE_WRONLY)
        file.Set_size(points * ROW_BYTES)
        for turn in range(turns):
            start = min(first + turn * POINTS_AT_A_TIME, end)
            file.Write_at_all(start * ROW_BYTES, rows(component, start, min(POINTS_AT_A_TIME, end - start)) if start < end else b"")
        file.Close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
