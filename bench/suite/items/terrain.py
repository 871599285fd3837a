"""Terrain parameters of an elevation model by GDAL's own programs (the demonstration's workflow; PerSSD, Figures 10 and 11), at three
sizes: total time, and the drain's share of it."""

import subprocess
from pathlib import Path

from suite.items.cell import HEADLINE_ROUNDS, MIB, PYTHON, Cell, Item
from suite.testbed import CHECKOUT
from suite.variants import Workload

MAKEFILE = CHECKOUT / "demo/terrain.mk"
ELEVATION = CHECKOUT / "demo/elevation"
FULL_PIXELS = 4096
PIXEL_BYTES = 4


def workload(pixels: int) -> Workload:
    def prepare(directory: Path) -> None:
        whole = directory / "whole.tif"
        subprocess.run([PYTHON, ELEVATION, whole], check=True)
        if pixels == FULL_PIXELS:
            whole.rename(directory / "dem.tif")
            return
        size = ["-outsize", str(pixels), str(pixels), "-r", "average"]
        subprocess.run(["gdal_translate", "-q", "-co", "TILED=YES", *size, whole, directory / "dem.tif"], check=True)
        whole.unlink()

    model = pixels * pixels * PIXEL_BYTES / MIB
    # Of each of three products: tiles, tiles without margins, mosaic; and once the tiles of the model. Shaded relief has one byte a pixel.
    return Workload(
        name=f"terrain-{pixels}",
        prepare=prepare,
        command=("make", "-s", "-f", str(MAKEFILE), "-j2", "DEM=dem.tif"),
        inputs=("dem.tif",),
        finals=("slope.tif", "aspect.tif", "hillshade.tif", "hillshade.png"),
        temporaries=("crop/**", "trim/**", "slope/**", "aspect/**", "hillshade/**", "/*.vrt"),
        read_mib=model,
        written_mib=7.75 * model,
        final_mib=2.25 * model,
        moved_mib=16 * model,
        compute_s=8 * (pixels / FULL_PIXELS) ** 2 + 1.5,
    )


def cells(mode: str) -> list[Cell]:
    def one(pixels: int, preset: str, variants: tuple[str, ...], **conditions) -> Cell:
        return Cell("terrain", f"{pixels} × {pixels} pixels", workload(pixels), variants, preset, parameters={"pixels": pixels}, **conditions)

    if mode == "smoke":
        return [one(512, "nfs", ("store", "in-memory", "copy-all"))]
    if mode == "headline":
        return [one(FULL_PIXELS, "nfs", ("store", "in-memory", "copy-all"), rounds=4)]
    variants = ("store", "copy-all", "in-memory", "by-hand")
    found = [one(pixels, "nfs", variants, rounds=HEADLINE_ROUNDS if pixels == FULL_PIXELS else 5) for pixels in (1024, 2048, FULL_PIXELS)]
    return [*found, one(FULL_PIXELS, "moosefs", ("store", "copy-all", "in-memory"), rounds=5)]


ITEM = Item("terrain", cells)
