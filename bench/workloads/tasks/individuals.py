"""One job of the genome workflow: from some lines of a chromosome's table, a tiny file for each individual with its mutations.

usage: individuals.py CHROMOSOME.vcf FIRST END FOLDER        records FIRST to END - 1
"""

import os
import sys


def main(table: str, first: int, end: int, folder: str) -> None:
    os.makedirs(folder)
    with open(table) as lines:
        columns = next(lines).split()[3:]
        mutations: list[list[str]] = [[] for _ in columns]
        for number, line in enumerate(lines):
            if number >= end:
                break
            if number < first:
                continue
            position, identifier, frequency, *alleles = line.split()
            for of_one, pair in zip(mutations, alleles, strict=True):
                if pair != "0|0":
                    of_one.append(f"{position}\t{identifier}\t{frequency}\n")
    for name, of_one in zip(columns, mutations, strict=True):
        with open(os.path.join(folder, name), "w") as file:
            # (A line at a time, as the original does; the buffer decides when a system call follows.)
            for line in of_one:
                file.write(line)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
