"""One job of the genome workflow: concatenates each individual's files of all chunks.

usage: merge_individuals.py FOLDER CHUNK…        in the order of the chunks
"""

import os
import sys


def main(folder: str, chunks: list[str]) -> None:
    os.makedirs(folder)
    for name in sorted(os.listdir(chunks[0])):
        with open(os.path.join(folder, name), "wb") as whole:
            for chunk in chunks:
                with open(os.path.join(chunk, name), "rb") as piece:
                    whole.write(piece.read())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
