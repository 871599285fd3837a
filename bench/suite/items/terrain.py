"""Terrain parameters of an elevation model by GDAL's own programs (the demonstration's workflow; PerSSD, Figures 10 and 11), at three
sizes: total time, and the drain's share of it."""

import subprocess
from pathlib import Path

from suite.items.cell import FULL_ROUNDS, HEADLINE_ROUNDS, MIB, PYTHON, Cell, Item
from suite.testbed import CHECKOUT
from suite.variants import Workload

MAKEFILE = CHECKOUT / "demo/terrain.mk"
ELEVATION = CHECKOUT / "demo/elevation"
ELEVATION_PIXELS = 4096
PIXEL_BYTES = 4
# Pixels and tiles, each way; PerSSD's Table I has 2 to 4 tiles.
SIZES = [(2048, 2), (4096, 2), (6144, 3)]


def workload(pixels: int, tiles: int) -> Workload:
    def prepare(directory: Path) -> None:
        whole = directory / "whole.tif"
        subprocess.run([PYTHON, ELEVATION, whole], check=True)
        if pixels == ELEVATION_PIXELS:
            whole.rename(directory / "dem.tif")
            return
        size = ["-outsize", str(pixels), str(pixels), "-r", "cubic"]
        subprocess.run(["gdal_translate", "-q", "-co", "TILED=YES", *size, whole, directory / "dem.tif"], check=True)
        whole.unlink()

    model = pixels * pixels * PIXEL_BYTES / MIB
    # For each of three products: tiles, tiles without margins, mosaic; plus the tiles of the model. Shaded relief has one byte a pixel.
    return Workload(
        name=f"terrain-{pixels}",
        prepare=prepare,
        command=("make", "-s", "-f", str(MAKEFILE), "-j2", "DEM=dem.tif", f"TILES={tiles}"),
        inputs=("dem.tif",),
        finals=("slope.tif", "aspect.tif", "hillshade.tif", "hillshade.png", "hillshade.png.aux.xml"),
        temporaries=("crop/**", "trim/**", "slope/**", "aspect/**", "hillshade/**", "/*.vrt"),
        read_mib=model,
        written_mib=7.75 * model,
        final_mib=2.25 * model,
        moved_mib=16 * model,
        compute_s=5 * (pixels / ELEVATION_PIXELS) ** 2 + tiles**2 * 0.35,
    )


def cells(mode: str) -> list[Cell]:
    def one(pixels: int, tiles: int, preset: str, variants: tuple[str, ...], **conditions) -> Cell:
        parameters = {"pixels": pixels, "tiles": tiles}
        return Cell("terrain", f"{pixels} × {pixels} pixels, {tiles} × {tiles} tiles", workload(pixels, tiles), variants, preset, parameters=parameters, **conditions)

    if mode == "smoke":
        return [one(512, 2, "nfs", ("store", "in-memory", "copy-all"))]
    if mode == "headline":
        return [one(*SIZES[-1], "nfs", ("store", "in-memory", "copy-all"), rounds=3)]
    variants = ("store", "copy-all", "in-memory")
    found = [one(*size, "nfs", (*variants, "by-hand"), rounds=rounds) for size, rounds in zip(SIZES, (FULL_ROUNDS, FULL_ROUNDS, HEADLINE_ROUNDS), strict=True)]
    return [*found, one(*SIZES[1], "moosefs", ("store", "copy-all", "in-memory"))]


ITEM = Item("terrain", cells)
