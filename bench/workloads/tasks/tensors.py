"""The Green's tensors of the pair of jobs, as both jobs and the check use them.

A file has POINTS rows of STEPS samples (little-endian 32-bit floats): a wavelet, shifted and scaled for each point. It takes no
time to compute, as in the paper, whose first job only imitates the output of the real one.
"""

import numpy as np

COMPONENTS = ("fx.sgt", "fy.sgt")
STEPS = 2048
SLIP_STEPS = 256
ROW_BYTES = STEPS * 4


def wavelet(component: int) -> np.ndarray:
    moment = np.linspace(-4, 4, STEPS)
    return ((1 - moment**2) * np.exp(-(moment**2) / 2) + component * 0.25 * np.sin(moment * 9)).astype("<f4")


def rows(component: int, first: int, count: int) -> np.ndarray:
    point = np.arange(first, first + count)
    shifts = (point * 7919 + component * 104729) % STEPS
    scales = (1 + (point * 31 % 997) / 997).astype("<f4")
    twice = np.tile(wavelet(component), 2)
    return np.stack([twice[shift : shift + STEPS] for shift in shifts]) * scales[:, None]


def span(rank: int, ranks: int, points: int) -> tuple[int, int]:
    """The points that a rank holds: from, to."""
    return rank * points // ranks, (rank + 1) * points // ranks


def ruptured(rupture: int, ruptures: int, points: int) -> int:
    """The point that a rupture is nearest to."""
    return (rupture * 2654435761 % (1 << 32)) * points >> 32


def slip(rupture: int) -> np.ndarray:
    """The slip's course in time."""
    moment = np.arange(SLIP_STEPS) / SLIP_STEPS
    return (moment ** (1 + rupture % 5) * np.exp(-moment * (2 + rupture % 7))).astype("<f4")


def names(rupture: int) -> list[str]:
    folder = f"seismograms/{rupture // 250:03}"
    return [f"{folder}/{rupture:05}.{kind}" for kind in ("x.bin", "y.bin", "peak", "duration")]
