"""Replaces Montage's mConcatFit, which Debian omits: makes one table of all planes that mFitplane found.

usage: concat_fit.py DIFFS.tbl FIT_FOLDER OUT.tbl
"""

import re
import sys
from pathlib import Path

NUMBERS = ["a", "b", "c", "crpix1", "crpix2", "xmin", "xmax", "ymin", "ymax", "xcenter", "ycenter", "npixel", "rms", "boxx", "boxy"]
NUMBERS += ["boxwidth", "boxheight", "boxang"]


def main(diffs: str, folder: str, out: str) -> None:
    pairs = [line.split() for line in Path(diffs).read_text().splitlines() if line and line[0] not in "|\\"]
    with open(out, "w") as table:
        print("|", "|".join(f"{name:>16}" for name in ["plus", "minus", *NUMBERS]), "|", sep="", file=table)
        print("|", "|".join(f"{kind:>16}" for kind in ["int"] * 2 + ["double"] * len(NUMBERS)), "|", sep="", file=table)
        for first, second, _, _, name in pairs:
            fit = Path(folder, Path(name).stem + ".txt").read_text()
            # A pair that overlaps too little for a plane has a warning there.
            if 'stat="OK"' in fit:
                found = dict(re.findall(r"(\w+)=([-+.\deE]+)", fit))
                print(" ", " ".join(f"{word:>16}" for word in [first, second, *(found[name] for name in NUMBERS)]), " ", sep="", file=table)


if __name__ == "__main__":
    main(*sys.argv[1:])
