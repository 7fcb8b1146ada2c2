"""RobustFit: costs fitted online over samples, some of which are bad; CopyModel: those of copies.

A sample that took ten times as long (a compile, a pause) counts by its absolute deviation, not by
its square. A thousand similar samples push out only samples of their own kind, so what unlike ones
taught is not forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NUM_KINDS = 64  # kinds differ by a factor of 4 in some feature; a server shows a dozen or two
PER_KIND = 8  # the latest samples of each kind; a median of 8 tolerates three outliers
# After this many other samples, a sample counts half: what a clock throttled an hour ago measured
# says little, but more than nothing, about lengths not seen since.
HALF_LIFE = 2000
FLAT = 0.05  # smaller relative deviations are noise, and no reason to weigh a sample less
ROUNDS = 3  # of reweighting, which starts from the last fit and so is nearly there


class RobustFit:
    """Least absolute relative deviations over the samples kept, with no cost below 0.

    An `add` takes microseconds; every 128th, and a few of the first ones, also fits, which takes
    some 0.2 ms. Memory is bounded by NUM_KINDS * PER_KIND samples.
    """

    def __init__(self, num_features: int) -> None:
        self._x: Array = np.zeros((NUM_KINDS * PER_KIND, num_features))
        self._seconds: Array = np.zeros(NUM_KINDS * PER_KIND)
        self._serial: Array = np.zeros(NUM_KINDS * PER_KIND)
        # kind -> (its row among kinds, samples seen), least recently seen first
        self._kinds: OrderedDict[tuple[int, ...], tuple[int, int]] = OrderedDict()
        self._num_added = self._next_fit = 0
        self.coefficients: tuple[float, ...] = (0.0,) * num_features

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Add an observation: `features` (all >= 0) took `seconds`. Impossible ones are skipped."""
        if not 0.0 < seconds < math.inf:
            return
        kind = tuple([(math.frexp(feature)[1] + 1) >> 1 for feature in features])
        place, seen = self._kinds.pop(kind, (-1, 0))
        if place < 0:
            place = len(self._kinds)
            if place == NUM_KINDS:
                place = self._kinds.popitem(last=False)[1][0]
                self._seconds[place * PER_KIND : (place + 1) * PER_KIND] = 0.0
        self._kinds[kind] = (place, seen + 1)
        row = place * PER_KIND + seen % PER_KIND
        self._num_added += 1
        self._x[row] = features
        self._seconds[row] = seconds
        self._serial[row] = self._num_added
        if self._num_added >= self._next_fit:
            self.fit()

    def fit(self) -> None:
        """Fit all kept samples. While serving, `add` calls this often enough."""
        self._next_fit = self._num_added + min(128, max(4, self._num_added // 2))
        rows = np.flatnonzero(self._seconds)
        x, seconds = self._x[rows], self._seconds[rows]
        recent = 0.5 ** ((self._num_added - self._serial[rows]) / HALF_LIFE)
        predicted = x @ np.asarray(self.coefficients)
        weight = recent
        if predicted.min() > 0.0:
            weight = recent / np.maximum(np.abs(seconds / predicted - 1.0), FLAT)
        else:
            predicted = seconds
        try:
            with np.errstate(all="raise", under="ignore"):
                for _ in range(ROUNDS):
                    solution = _solve(x / predicted[:, None], seconds / predicted, weight)
                    fitted = x @ solution
                    predicted = np.where(fitted > 0.0, fitted, seconds)
                    weight = recent / np.maximum(np.abs(seconds / predicted - 1.0), FLAT)
        except (np.linalg.LinAlgError, FloatingPointError):  # the samples are too alike for floats
            return
        self.coefficients = tuple(solution.tolist())


def _solve(x: Array, y: Array, weight: Array) -> Array:
    """Weighted least squares; costs below 0 become 0. Weights are scaled to 1 on average, and
    there is just enough of a ridge to solve it if features are collinear."""
    weight = weight / weight.sum() * len(weight)
    weighted = x * weight[:, None]
    a, b = x.T @ weighted, y @ weighted
    scale = a.diagonal() / len(weight)
    a = a + np.diag(np.where(scale > 0.0, 1e-6 * scale, 1.0))
    solution = np.zeros(len(b))
    left = np.arange(len(b))
    while len(left):
        root = np.sqrt(a.diagonal()[left])  # to unit diagonal: features span ten decades
        part = np.linalg.solve(a[np.ix_(left, left)] / np.outer(root, root), b[left] / root)
        part = part / root
        if part.min() >= 0.0:
            solution[left] = part
            break
        left = np.delete(left, part.argmin())
    return solution


MIN_TRANSFERS = 4  # two costs need two unlike transfers; this is twice as many


class CopyModel:
    """Latency + seconds per block, from queued to settled, because a turn waits for that."""

    def __init__(self) -> None:
        self._fit = RobustFit(2)
        self._guess = (0.0, 0.0)
        self.num_transfers = 0

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from enough transfers."""
        return self.num_transfers >= MIN_TRANSFERS

    def guess(self, latency: float, per_block: float) -> None:
        """What `seconds` answers with until something is known."""
        self._guess = (latency, per_block)

    def add(self, num_blocks: int, seconds: float) -> None:
        """A transfer of `num_blocks` settled `seconds` after it was queued; 0 is ignored."""
        if seconds <= 0.0:
            return
        self._fit.add((1.0, num_blocks), seconds)
        self.num_transfers += 1

    def seconds(self, num_blocks: int) -> float:
        """Seconds that `num_blocks` take; 0.0 for none."""
        if num_blocks <= 0:
            return 0.0
        latency, per_block = self._fit.coefficients if self.is_known else self._guess
        return latency + per_block * num_blocks
