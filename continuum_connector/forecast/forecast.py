"""Forecast: when a program's next turn will come, as a distribution and not a mean.

Gaps of agents span six decades, so the distribution is kept on a grid of
quarter octaves: two neighbours differ by 19 %, less than any two policies care about.

Survival counts how long gaps last, on the same grid. Three facts shape it. Gaps are heavy-tailed,
so it keeps a curve instead of moments: a ten-minute outlier is one count in one bin. A program that
has not come back tells us something, too (its gap is longer than this), so it counts not only who
returned but also who left the risk set and when: the product-limit estimate of Kaplan and Meier.
And a few observations must lean on more general ones: `shrunk` counts a parent's curve as `weight`
more observations. That is the Bayes estimate under a Dirichlet prior with that curve (Susarla and
Van Ryzin, 1976); without open gaps it is simply the weighted mean of the observed and the parent's
distribution.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]  # a number per bin

# Seconds: 20 ms, less than any tool call through HTTP takes, to a day and a half.
EDGES: tuple[float, ...] = tuple(0.02 * 2 ** (k / 4) for k in range(91))
_NOBODY = 1e-6  # a share of programs
_WIDTHS = tuple(high - low for low, high in pairwise(EDGES))


class Forecast:
    """P(gap <= t) on EDGES, linear between them. What the last one lacks to 1 never returns.

    `num_seen`: how many observations of exactly this kind of call it is based on, where older ones
    count less. Immutable.
    """

    def __init__(self, cdf: Sequence[float], num_seen: float = 0.0) -> None:
        """`cdf[i]` is P(gap <= EDGES[i]), which never falls and stays within 0 and 1."""
        if len(cdf) != len(EDGES):
            raise ValueError(f"{len(cdf)} values for {len(EDGES)} edges")
        self.cdf = tuple(cdf)
        self.num_seen = num_seen

    @classmethod
    def known(cls, gap_s: float) -> Forecast:
        """A certain forecast: a return after `gap_s`, to the grid's precision."""
        return cls([1.0 if edge >= gap_s else 0.0 for edge in EDGES], math.inf)

    @classmethod
    def never(cls) -> Forecast:
        """The forecast for a program that will not be back."""
        return cls([0.0] * len(EDGES), math.inf)

    @classmethod
    def longest(cls, forecasts: Sequence[Forecast]) -> Forecast:
        """The forecast of the longest of several independent calls; needs at least one."""
        cdf = [math.prod(values) for values in zip(*(f.cdf for f in forecasts), strict=True)]
        return cls(cdf, min(f.num_seen for f in forecasts))

    def within(self, t: float) -> float:
        """P(gap <= t)."""
        if t >= EDGES[-1]:
            return self.cdf[-1]
        if t <= 0.0:
            return 0.0
        index = bisect_right(EDGES, t)
        low, p_low = (EDGES[index - 1], self.cdf[index - 1]) if index else (0.0, 0.0)
        return p_low + (self.cdf[index] - p_low) * (t - low) / (EDGES[index] - low)

    def held(self, t: float) -> float:
        """Seconds for which a pin of TTL `t` is held on average: the integral of P(gap > u)."""
        if t >= EDGES[-1]:
            return self.held_at[-1] + (t - EDGES[-1]) * (1.0 - self.cdf[-1])
        if t <= 0.0:
            return 0.0
        return self._before(bisect_right(EDGES, t), t)[1]

    def _before(self, index: int, t: float) -> tuple[float, float]:
        """`within` and `held` of a time in the bin that ends at EDGES[index]."""
        low, p_low, held = 0.0, 0.0, 0.0
        if index:
            low, p_low, held = EDGES[index - 1], self.cdf[index - 1], self.held_at[index - 1]
        p = p_low + (self.cdf[index] - p_low) * (t - low) / (EDGES[index] - low)
        return p, held + (t - low) * (1.0 - (p_low + p) / 2)

    def quantile(self, q: float) -> float:
        """The time by which a share `q` of programs has returned; infinity if fewer ever do."""
        index = next((i for i, p in enumerate(self.cdf) if p >= q), None)
        if index is None:
            return math.inf
        low, p_low = (EDGES[index - 1], self.cdf[index - 1]) if index else (0.0, 0.0)
        p_high = self.cdf[index]
        share = (q - p_low) / (p_high - p_low) if p_high > p_low else 1.0
        return low + share * (EDGES[index] - low)

    @cached_property
    def held_at(self) -> tuple[float, ...]:
        """`held` at each of EDGES, as `cdf` is `within` there."""
        first = EDGES[0] * (1.0 - self.cdf[0] / 2)
        pairs = zip(_WIDTHS, pairwise(self.cdf), strict=True)
        parts = [width * (1.0 - (low + high) / 2) for width, (low, high) in pairs]
        return tuple(accumulate(parts, initial=first))

    @cached_property
    def row(self) -> Row:
        """`cdf` as numpy has it."""
        return np.array(self.cdf)

    @cached_property
    def held_row(self) -> Row:
        """`held_at` as numpy has it."""
        return np.array(self.held_at)

    def soonest(self, age: float) -> float:
        """Seconds of keeping that one return costs at best, after `age` seconds without a return.

        The least H / P over all times at which to give up: the remaining gap if it is known, more
        if a return is unsure, infinity if none is expected any more. Its inverse is the Gittins
        index of the kept blocks. So a program that will return within 1 s or else never is not
        confused with one that is certainly away for an hour.
        """
        return self._soonest(age) if age > 0.0 else self._soonest_of_all

    @cached_property
    def _soonest_of_all(self) -> float:
        """The same for a program that has just left, which every turn's end asks for."""
        return self._soonest(0.0)

    def _soonest(self, age: float) -> float:
        first, best = bisect_right(EDGES, age), math.inf
        if first == _NUM_BINS:
            return best
        p_now, held_now = self._before(first, age)
        most = self.cdf[-1] - p_now
        if most <= _NOBODY:
            return best
        # A plain loop that stops early, because this is called for dozens of programs at a time.
        for p, held in zip(self.cdf[first:], self.held_at[first:], strict=True):
            kept_s, back = held - held_now, p - p_now
            if kept_s >= best * most:  # even if all of them were back by then
                break
            if back > _NOBODY and kept_s < best * back:
                best = kept_s / back
        return best


def came_true(gap_s: float | None, watched_s: float, horizon_s: float) -> bool | None:
    """Whether the program returned within `horizon_s`; None while nobody can know.

    `gap_s`: after how long it returned, None if it did not. `watched_s`: how long we then waited
    for it, 0 if nobody can say.
    """
    if gap_s is not None:
        return gap_s <= horizon_s
    return False if watched_s >= horizon_s else None


Curve: TypeAlias = "Sequence[float] | Row"  # P(gap > EDGES[i])

# An observation counts half after so many more of its key. A key is then based on up to 145, which
# gives a share of one half to within 4 points, and adapts to a new distribution within 100.
# bench/gaps of c109eba, on a trace: 50 to 200 forecast about equally well, longer no better.
HALF_LIFE = 100

_GROWTH = 2.0 ** (1.0 / HALF_LIFE)  # new observations weigh more; old ones are not scaled down
_TOO_HEAVY = 1e6  # at this weight everything is scaled down, once in 20 half-lives
_MOST = 1e12  # no count can be above it
_ONE = np.ones(1)
_NUM_BINS = len(EDGES)  # bin i ends at EDGES[i]; a gap longer than the last edge has no bin


class Survival:
    """The counts of one key, in 2 KB. `add` costs a microsecond, `shrunk` about ten."""

    __slots__ = ("_counts", "_total", "_unit")

    def __init__(self) -> None:
        # Two rows, one number per bin. 0: who returned in it. 1: + who left the risk set at its
        # end, - who enters it there: the sum from bin i upwards is how many were at risk in i.
        # An array, because single items are quick to change; numpy views it when all are needed.
        self._counts = array("d", bytes(8 * 2 * _NUM_BINS))
        self._unit = 1.0  # the weight of an observation made now
        self._total = 0.0

    @property
    def num_seen(self) -> float:
        """The number of observations, where older ones count less."""
        return self._total / self._unit

    def add(self, gap_s: float, is_over: bool = True, after_s: float = 0.0) -> None:
        """Count a gap that ended after `gap_s`, or one of that age that has not ended.

        Its first `after_s` seconds were counted before, by an `add` with `is_over` False.
        """
        first = bisect_right(EDGES, after_s)
        # A bin in which an open gap is still under way says nothing about it yet.
        last = bisect_left(EDGES, gap_s) if is_over else bisect_right(EDGES, gap_s) - 1
        is_over = is_over and last < _NUM_BINS
        last = min(last, _NUM_BINS - 1)
        if last < first:
            return
        if after_s <= 0.0:  # each gap counts once
            self._grow()
            self._total += self._unit
        self._counts[_NUM_BINS + last] += self._unit
        if first:
            self._counts[_NUM_BINS + first - 1] -= self._unit
        if is_over:
            self._counts[last] += self._unit

    def shrunk(self, parent: Curve, weight: float) -> Row:
        """P(gap > EDGES[i]), with the parent's curve counted as `weight` new observations."""
        returned, at_risk = self._returned_and_at_risk()
        after = np.asarray(parent)
        before = np.concatenate((_ONE, after[:-1]))
        pull = weight * self._unit
        at_risk = np.maximum(at_risk + pull * before, 1e-12)  # with nobody at risk, nobody returns
        hazard = (returned + pull * (before - after)) / at_risk
        return np.cumprod(np.clip(1.0 - hazard, 0.0, 1.0))

    def _returned_and_at_risk(self) -> tuple[Row, Row]:
        returned, left = np.frombuffer(self._counts).reshape(2, _NUM_BINS)
        return returned, np.cumsum(left[::-1])[::-1]

    def _grow(self) -> None:
        self._unit *= _GROWTH
        if self._unit > _TOO_HEAVY:
            self._counts = array("d", [x / self._unit for x in self._counts])
            self._total /= self._unit
            self._unit = 1.0
