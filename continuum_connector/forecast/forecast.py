"""Forecast: when a program's next turn will come, as a distribution and not a mean.

Gaps of agents span six decades, so the distribution is kept on a grid of
quarter octaves: two neighbours differ by 19 %, less than any two policies care about.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]

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

    def first_of(self, number: int) -> Forecast:
        """When the first of `number` programs is back, each with this forecast; needs at least
        one."""
        return Forecast([1.0 - (1.0 - p) ** number for p in self.cdf], self.num_seen)

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
        index = bisect_right(EDGES, t)
        low, p_low, held = (0.0, 0.0, 0.0)
        if index:
            low, p_low, held = EDGES[index - 1], self.cdf[index - 1], self.held_at[index - 1]
        return held + (t - low) * (1.0 - (p_low + self.within(t)) / 2)

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
        parts = (width * (1.0 - (low + high) / 2) for width, (low, high) in pairs)
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
        p_now, best = self.within(age), math.inf
        most = self.cdf[-1] - p_now
        if most <= _NOBODY:
            return best
        held_now, first = self.held(age), bisect_right(EDGES, age)
        # A plain loop that stops early, because this is called for dozens of programs at a time.
        for p, held in zip(self.cdf[first:], self.held_at[first:], strict=True):
            if held - held_now >= best * most:  # even if all of them were back by then
                break
            if p - p_now > _NOBODY and held - held_now < best * (p - p_now):
                best = (held - held_now) / (p - p_now)
        return best


def came_true(gap_s: float | None, watched_s: float, horizon_s: float) -> bool | None:
    """Whether the program returned within `horizon_s`; None while nobody can know.

    `gap_s`: after how long it returned, None if it did not. `watched_s`: how long we then waited
    for it, 0 if nobody can say.
    """
    if gap_s is not None:
        return gap_s <= horizon_s
    return False if watched_s >= horizon_s else None
