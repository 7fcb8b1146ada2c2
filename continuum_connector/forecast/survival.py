"""Survival: how long gaps last, on EDGES; old gaps count less, and open gaps count too.

Three facts shape it. Gaps are heavy-tailed, so it keeps a curve instead of moments: a ten-minute
outlier is one count in one bin. A program that has not come back tells us something, too (its gap
is longer than this), so it counts not only who returned but also who left the risk set and when:
the product-limit estimate of Kaplan and Meier. And a few observations must lean on more general
ones: `shrunk` counts a parent's curve as `weight` more observations. That is the Bayes
estimate under a Dirichlet prior with that curve (Susarla and Van Ryzin, 1976); without open
gaps it is simply the weighted mean of the observed and the parent's distribution.
"""

from __future__ import annotations

import binascii
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from continuum_connector.forecast.forecast import EDGES

Row: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"  # a number per bin
Curve: TypeAlias = "Sequence[float] | Row"  # P(gap > EDGES[i])

# An observation counts half after so many more of its key. A key is then based on up to 145, which
# gives a share of one half to within 4 points, and adapts to a new distribution within 100.
# bench/gaps, on a trace: 50 to 200 forecast about equally well, longer memories no better.
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

    def to_state(self) -> tuple[float, float, bytes]:
        """A copy of unit, total and counts. It is cheap, because there are thousands of keys."""
        return (self._unit, self._total, self._counts.tobytes())

    @classmethod
    def from_state(cls, state: object) -> Survival | None:
        """The inverse of to_state, after JSON has turned it into a list with base64.

        None for anything else.
        """
        match state:
            case [float(unit), float(total), str(encoded)]:
                pass
            case _:
                return None
        self = cls()
        try:
            counts = array("d", binascii.a2b_base64(encoded.encode()))
        except ValueError:
            return None
        if len(counts) != len(self._counts) or not 1.0 <= unit <= 2 * _TOO_HEAVY:
            return None
        self._unit, self._total, self._counts = unit, total, counts
        return self if total >= 0.0 and self._is_sound() else None

    def _returned_and_at_risk(self) -> tuple[Row, Row]:
        returned, left = np.frombuffer(self._counts).reshape(2, _NUM_BINS)
        return returned, np.cumsum(left[::-1])[::-1]

    def _is_sound(self) -> bool:
        """Whether the numbers can be counts: nobody returns who was not at risk."""
        if not all(
            abs(number) <= _MOST for number in (self._total, *self._counts)
        ):  # NaN fails, too
            return False
        returned, at_risk = self._returned_and_at_risk()
        slack = 1e-6 * max(self._total, self._unit)
        return bool((returned >= -slack).all() and (returned <= at_risk + slack).all())

    def _grow(self) -> None:
        self._unit *= _GROWTH
        if self._unit > _TOO_HEAVY:
            self._counts = array("d", [x / self._unit for x in self._counts])
            self._total /= self._unit
            self._unit = 1.0
