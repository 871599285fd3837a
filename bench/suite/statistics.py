"""The median, the spread, and the confidence interval of a ratio."""

import random
import statistics
from dataclasses import dataclass

RESAMPLES = 10_000
SEED = 20261124


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} – {self.high:.2f})"


def paired_ratio(numerators: list[float], denominators: list[float]) -> Ratio:
    """Median of the rounds' ratios, with its 95 % bootstrap interval (percentiles). Rounds are resampled whole: values that
    were measured in the same minute stay together."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    chance = random.Random(SEED)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.2f} – {max(values):.2f})"
