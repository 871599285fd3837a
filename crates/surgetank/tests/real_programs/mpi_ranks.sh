# Ranks of one MPI program: each writes files of its own, all write one file together, and one rank reads all of them.
# needs: mpirun
# python: mpi4py numpy
cat >"$HOME/ranks.py" <<'P'
import os
import sys
import numpy as np
from mpi4py import MPI

everybody = MPI.COMM_WORLD
rank, ranks = everybody.rank, everybody.size
if rank == 0:
    os.mkdir("own")
everybody.Barrier()
for step in range(5):
    with open(f"own/rank{rank}-step{step}", "wb") as file:
        np.full(10_000, rank * 100 + step, dtype="i4").tofile(file)
everybody.Barrier()
# Each rank reads its neighbour's file.
neighbour = (rank + 1) % ranks
found = [int(np.fromfile(f"own/rank{neighbour}-step{step}", dtype="i4").sum()) for step in range(5)]
print(f"rank {rank} of {ranks} reads {found}", flush=True)

# One file: at explicit offsets, through a view of interleaved blocks, by the shared pointer, and collectively.
shared = MPI.File.Open(everybody, "shared", MPI.MODE_CREATE | MPI.MODE_RDWR)
shared.Set_size(4_000_000)
piece = np.full(100_000, rank + 1, dtype="i4")
shared.Write_at_all(rank * piece.nbytes, piece)
start = ranks * piece.nbytes
blocks = MPI.INT.Create_vector(50, 1000, 1000 * ranks)
blocks.Commit()
shared.Set_view(start + rank * 4000, MPI.INT, blocks)
shared.Write_all(np.arange(50_000, dtype="i4") * ranks + rank)
shared.Sync()
everybody.Barrier()
shared.Sync()
shared.Set_view(0)
if rank == 0:
    all_of_it = np.empty(ranks * 100_000 + ranks * 50_000, dtype="i4")
    shared.Read_at(0, all_of_it)
    print(all_of_it[::50_000].tolist(), int(all_of_it.astype("i8").sum()), shared.Get_size(), flush=True)
shared.Close()

together = MPI.File.Open(everybody, "appended", MPI.MODE_CREATE | MPI.MODE_WRONLY | MPI.MODE_APPEND)
for step in range(20):
    together.Write_shared(f"{rank} {step:03}\n".encode())
together.Close()
if rank == 0:
    lines = open("appended").read().split("\n")
    # The order varies, so the output is sorted for the comparison.
    with open("appended", "w") as file:
        file.write("\n".join(sorted(lines)))
    print(len(lines), sorted(os.listdir(".")), flush=True)
everybody.Barrier()
scratch = MPI.File.Open(everybody, "scratch", MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)
scratch.Write_ordered(bytes([rank]) * 1000)
scratch.Close()
print(rank, os.path.exists("scratch"), flush=True)
P
# MPI's own files are removed with the scratch directory.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$HOME
# On one machine, by shared memory, without a search for networks or for other machines.
mpirun --oversubscribe -n 2 --mca btl self,vader --mca plm isolated --mca oob_tcp_if_include lo \
    "$PYTHON" "$HOME/ranks.py" >ranks.log
sort ranks.log
rm ranks.log
