"""One job of the genome workflow: for each two neighbours of a population, the number of harmful mutations that they share, and
the frequency of each in the whole population.

usage: overlap.py POPULATION MERGED SIFTED PAIRS FREQUENCIES
"""

import sys
from collections import Counter
from pathlib import Path


def main(population: str, merged: str, sifted: str, pairs: str, frequencies: str) -> None:
    harmful = {line.split()[0] for line in Path(sifted).read_text().splitlines()}
    names = Path(population).read_text().split()
    of = {name: {line.split("\t")[1] for line in Path(merged, name).read_text().splitlines()} & harmful for name in names}
    with open(pairs, "w") as file:
        file.writelines(f"{a}\t{b}\t{len(of[a] & of[b])}\n" for a, b in zip(names, names[1:]))
    counts = Counter(identifier for mutations in of.values() for identifier in mutations)
    with open(frequencies, "w") as file:
        file.writelines(f"{identifier}\t{times}\n" for identifier, times in sorted(counts.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
