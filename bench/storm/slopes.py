"""Does memory grow? A line through what wiggles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_POINTS = 400  # pairs of them are looked at
PER = 1000  # requests


@dataclass(frozen=True)
class Growth:
    """Bytes in the second half of a storm."""

    level: float  # median
    slope: float  # per 1,000 requests
    requests: int  # of the whole storm


def growth(requests: Sequence[float], sizes: Sequence[float]) -> Growth:
    """The growth over the second half of the requests; the first is the server's warming up."""
    last = requests[-1] if requests else 0.0
    late = [(x, y) for x, y in zip(requests, sizes, strict=True) if x >= last / 2]
    x, y = (np.array(column, dtype=float) for column in zip(*late or [(0.0, 0.0)], strict=True))
    return Growth(float(np.median(y)), PER * theil_sen(x, y), int(last))


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
