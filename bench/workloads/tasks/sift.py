"""One job of the genome workflow: the variants that an annotation calls harmful, with their scores, in order.

usage: sift.py ANNOTATION.vcf OUT
"""

import sys


def main(annotation: str, out: str) -> None:
    found = []
    with open(annotation) as lines:
        for line in lines:
            identifier, *notes = line.split()
            scores = [note.removeprefix("SIFT=") for note in notes if note.startswith("SIFT=")]
            if scores and float(scores[0]) < 0.05:
                found.append((identifier, scores[0]))
    with open(out, "w") as file:
        file.writelines(f"{identifier}\t{score}\n" for identifier, score in sorted(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
