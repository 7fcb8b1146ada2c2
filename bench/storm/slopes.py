"""Does memory grow? A line through what wiggles, and how little that line can be told from none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_POINTS = 400  # pairs of them are looked at
PER = 1000  # requests
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Growth:
    """Bytes in the second half of a storm. `noise`: what the line may tilt by without a cause."""

    level: float  # median
    slope: float  # per 1,000 requests
    noise: float  # likewise
    requests: int  # of the whole storm


def growth(requests: Sequence[float], sizes: Sequence[float]) -> Growth:
    """The growth over the second half of the requests; the first is the server's warming up."""
    last = requests[-1] if requests else 0.0
    late = [(x, y) for x, y in zip(requests, sizes, strict=True) if x >= last / 2]
    x, y = (np.array(column, dtype=float) for column in zip(*late or [(0.0, 0.0)], strict=True))
    slope = theil_sen(x, y)
    around = y - slope * x
    spread = 1.4826 * float(np.median(np.abs(around - np.median(around))))
    span = float(x[-1] - x[0])
    noise = 2 * spread / span if span else 0.0
    return Growth(float(np.median(y)), PER * slope, PER * noise, int(last))


def theil_sen(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """The median of the slopes between all pairs: a third of the points may be anything."""
    every = max(1, -(-len(x) // MOST_POINTS))
    x, y = np.asarray(x, float)[::every], np.asarray(y, float)[::every]
    first, second = np.triu_indices(len(x), 1)
    run = x[second] - x[first]
    apart = run != 0
    if not apart.any():
        return 0.0
    return float(np.median((y[second] - y[first])[apart] / run[apart]))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The values as a row of bars, from the least to the most."""
    if not values:
        return ""
    picked = np.interp(np.linspace(0, len(values) - 1, width), range(len(values)), values)
    low, high = float(picked.min()), float(picked.max())
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in picked)
