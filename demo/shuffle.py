#!/usr/bin/env python3
"""The tasks of the workflow of demo/nodes: sorts records in three stages. Each task is a process.

usage: shuffle.py split NUMBER      reads a piece of the input, and writes its records for each sort task into a file
       shuffle.py sort NUMBER       reads the files for this sort task from all split tasks, and writes the records sorted
       shuffle.py merge NUMBER      joins the sorted pieces

The tasks run in the workflow's directory, and do not know where their files are stored. The same input gives the same bytes every time.
"""

import sys
from pathlib import Path

NODES = 4
# As many split tasks as sort tasks. Task N runs on node N modulo NODES.
PIECES = 24
RECORD_BYTES = 64
# Each node writes in these directories only.
DIRECTORIES = [f"{stage}/node{node + 1}" for stage in ("parts", "sorted", "merged") for node in range(NODES)]


def input_piece(number: int) -> Path:
    return Path(f"input/{number:02}")


def part(split: int, sort: int) -> Path:
    return Path(f"parts/node{split % NODES + 1}/{split:02}-{sort:02}")


def sorted_piece(number: int) -> Path:
    return Path(f"sorted/node{number % NODES + 1}/{number:02}")


def split(number: int) -> None:
    parts: list[list[bytes]] = [[] for _ in range(PIECES)]
    for record in records(input_piece(number)):
        # A record begins with hexadecimal digits.
        parts[int(record[:4], 16) * PIECES >> 16].append(record)
    for sort, found in enumerate(parts):
        part(number, sort).write_bytes(b"".join(found))


def sort(number: int) -> None:
    found = [record for split in range(PIECES) for record in records(part(split, number))]
    sorted_piece(number).write_bytes(b"".join(sorted(found)))


def merge(number: int) -> None:
    with open(f"merged/node{number % NODES + 1}/all", "wb") as merged:
        for piece in range(PIECES):
            merged.write(sorted_piece(piece).read_bytes())


def records(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]


if __name__ == "__main__":
    {"split": split, "sort": sort, "merge": merge}[sys.argv[1]](int(sys.argv[2]))
