"""A made-up sky for Montage, and the truth to compare its mosaic with.

Stars and clouds are a function of the place in the sky. A frame is that function at the centres of its pixels, with its own tilted
background and noise, as exposures have. So the mosaic can be compared with the function itself. No package among the
permitted dependencies ships a picture of the sky with its position in the header. This one has a valid FITS header with a world
coordinate system (gnomonic, CDELT and CROTA2, which Debian's Montage reads).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CENTRE_DEG = (266.4, -29.0)
CARD, RECORD = 80, 2880
NOISE = 0.5
# The backgrounds differ by far more than the noise, so that their correction matters.
BACKGROUND = 40.0


@dataclass(frozen=True)
class Projection:
    """Gnomonic: pixel (from 1) of CRPIX looks at CRVAL; one pixel is CDELT degrees, turned by CROTA2."""

    centre_deg: tuple[float, float]
    reference: tuple[float, float]
    step_deg: tuple[float, float]
    turn_deg: float

    def sky(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Right ascension and declination, in radians."""
        turn = np.deg2rad(self.turn_deg)
        u, v = (x - self.reference[0]) * self.step_deg[0], (y - self.reference[1]) * self.step_deg[1]
        xi, eta = np.deg2rad(u * np.cos(turn) - v * np.sin(turn)), np.deg2rad(u * np.sin(turn) + v * np.cos(turn))
        ra, dec = np.deg2rad(self.centre_deg)
        below = np.cos(dec) - eta * np.sin(dec)
        return ra + np.arctan2(xi, below), np.arctan2(np.sin(dec) + eta * np.cos(dec), np.hypot(xi, below))


def plane(ra: np.ndarray, dec: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place in the plane that touches the sky at the field's centre, in arc seconds."""
    ra0, dec0 = np.deg2rad(CENTRE_DEG)
    cosine = np.sin(dec0) * np.sin(dec) + np.cos(dec0) * np.cos(dec) * np.cos(ra - ra0)
    xi = np.cos(dec) * np.sin(ra - ra0) / cosine
    eta = (np.cos(dec0) * np.sin(dec) - np.sin(dec0) * np.cos(dec) * np.cos(ra - ra0)) / cosine
    return np.rad2deg(xi) * 3600, np.rad2deg(eta) * 3600


class Sky:
    """The truth: clouds everywhere, stars of one width."""

    def __init__(self, width_arcsec: float, height_arcsec: float, stars: int, star_arcsec: float) -> None:
        dice = np.random.default_rng(42)
        self.star_arcsec = star_arcsec
        self.reach = 5 * star_arcsec
        self.stars = np.stack(
            [dice.uniform(-0.6, 0.6, stars) * width_arcsec, dice.uniform(-0.6, 0.6, stars) * height_arcsec, 30 * dice.pareto(1.5, stars).clip(0.2, 60)],
            axis=1,
        )
        self.waves = [(*dice.uniform(-12, 12, 2) / max(width_arcsec, height_arcsec), dice.uniform(0, 6), dice.uniform(3, 12)) for _ in range(6)]

    def at(self, ra: np.ndarray, dec: np.ndarray) -> np.ndarray:
        xi, eta = plane(ra, dec)
        light = sum(height * np.sin(a * xi + b * eta + phase) for a, b, phase, height in self.waves)
        left, right, low, high = xi.min() - self.reach, xi.max() + self.reach, eta.min() - self.reach, eta.max() + self.reach
        for x, y, flux in self.stars:
            if left < x < right and low < y < high:
                # Only the rows and columns that the star can reach, because the picture is nearly a grid.
                rows = np.nonzero(np.abs(eta - y).min(axis=1) < self.reach)[0]
                columns = np.nonzero(np.abs(xi - x).min(axis=0) < self.reach)[0]
                if rows.size and columns.size:
                    window = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                    away = (xi[window] - x) ** 2 + (eta[window] - y) ** 2
                    light[window] += flux * np.exp(-away / (2 * self.star_arcsec**2))
        return light


def header(cards: dict[str, object]) -> bytes:
    lines = [f"{name:8}= {shown(value):>20}" for name, value in cards.items()] + ["END"]
    text = "".join(line.ljust(CARD) for line in lines).encode()
    return text.ljust(-(-len(text) // RECORD) * RECORD)


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    return f"'{value:8}'" if isinstance(value, str) else repr(value)


def write(path: Path, pixels: np.ndarray, projection: Projection) -> None:
    cards: dict[str, object] = {"SIMPLE": True, "BITPIX": -32, "NAXIS": 2, "NAXIS1": pixels.shape[1], "NAXIS2": pixels.shape[0]}
    cards |= {"CTYPE1": "RA---TAN", "CTYPE2": "DEC--TAN", "CRVAL1": projection.centre_deg[0], "CRVAL2": projection.centre_deg[1]}
    cards |= {"CRPIX1": projection.reference[0], "CRPIX2": projection.reference[1], "CDELT1": projection.step_deg[0], "CDELT2": projection.step_deg[1]}
    cards |= {"CROTA2": projection.turn_deg, "EQUINOX": 2000.0}
    content = pixels.astype(">f4").tobytes()
    path.write_bytes(header(cards) + content.ljust(-(-len(content) // RECORD) * RECORD, b"\0"))


def read(path: Path) -> tuple[np.ndarray, Projection]:
    content = path.read_bytes()
    cards, offset = {}, 0
    while not cards.get("END"):
        card = content[offset : offset + CARD].decode()
        if not card:
            raise ValueError(f"{path} is not a whole FITS file")
        cards[card[:8].strip()] = card[10:].partition("/")[0].strip().strip("'").strip() or card[:3] == "END"
        offset += CARD
    start, of = -(-offset // RECORD) * RECORD, lambda name, otherwise="0": float(cards.get(name, otherwise))
    shape = int(of("NAXIS2")), int(of("NAXIS1"))
    kind = {-32: ">f4", -64: ">f8"}[int(of("BITPIX"))]
    pixels = np.frombuffer(content, kind, shape[0] * shape[1], start).reshape(shape)
    places = Projection((of("CRVAL1"), of("CRVAL2")), (of("CRPIX1"), of("CRPIX2")), (of("CDELT1"), of("CDELT2")), of("CROTA2"))
    return pixels, places


def expose(sky: Sky, folder: Path, columns: int, rows: int, side: int, step_arcsec: float, apart: float = 2 / 3) -> None:
    """Frames of SIDE × SIDE pixels, APART of a side from each other, shifted and turned a little."""
    apart *= side * step_arcsec
    for row in range(rows):
        for column in range(columns):
            dice = np.random.default_rng([row, column])
            xi = (column - (columns - 1) / 2 + dice.uniform(-0.04, 0.04)) * apart
            eta = (row - (rows - 1) / 2 + dice.uniform(-0.04, 0.04)) * apart
            field = Projection(CENTRE_DEG, (0.0, 0.0), (1 / 3600, 1 / 3600), 0.0)
            ra, dec = (float(np.rad2deg(angle)) for angle in field.sky(np.float64(xi), np.float64(eta)))
            step = step_arcsec / 3600
            projection = Projection((ra, dec), (side / 2 + 0.5, side / 2 + 0.5), (-step, step), float(dice.uniform(-4, 4)))
            y, x = np.mgrid[1 : side + 1, 1 : side + 1].astype("f8")
            level, slope_x, slope_y = dice.uniform(-BACKGROUND, BACKGROUND, 3)
            pixels = sky.at(*projection.sky(x, y)) + level + slope_x * x / side + slope_y * y / side + dice.normal(0, NOISE, x.shape)
            write(folder / f"frame{row}{column}.fits", pixels, projection)
