"""Two ways to serve, compared in pairs: how many times as long, and how sure is that?

Runs of the same repeat got the same requests, so programs are compared with themselves. What
varies is drawn again with replacement: first the repeats, then within each the programs, for both
sides the same ones; 95 % of the ratios found lie within the interval. With one repeat it tells
nothing of how the machine differs from run to run, and says so by `num_repeats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS, SEED = 2000, 7
Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Sampled = Mapping[str, Sequence[float]]  # of one run: what was measured, by program
Statistic = Callable[[Values], float]


@dataclass(frozen=True)
class Ratio:
    """other / base with its 95 % interval; nan where there is nothing to compare."""

    value: float
    low: float
    high: float
    num_repeats: int
    num_programs: int  # of all repeats: those that both sides have

    @property
    def is_clear(self) -> bool:
        """Whether 1 lies outside of the interval."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x [{self.low:.2f}..{self.high:.2f}]"


def paired_ratio(
    base: Sequence[Sampled], other: Sequence[Sampled], statistic: Statistic, draws: int = DRAWS
) -> Ratio:
    """Compare runs that belong together: base[i] and other[i] got the same requests."""
    pairs: list[tuple[Sequence[float], Sequence[float]]] = []
    repeats: list[Indices] = []  # of each repeat: where its programs are in `pairs`
    for ours, theirs in zip(base, other, strict=True):
        both = [name for name in ours if len(ours[name]) and len(theirs.get(name, ()))]
        if both:
            repeats.append(np.arange(len(pairs), len(pairs) + len(both)))
            pairs += [(ours[name], theirs[name]) for name in both]
    if not pairs:
        return Ratio(math.nan, math.nan, math.nan, 0, 0)
    sides = _Side([pair[0] for pair in pairs]), _Side([pair[1] for pair in pairs])
    value = _ratio(sides, np.arange(len(pairs)), statistic)
    low = high = math.nan
    if len(pairs) > 1:
        rng = np.random.default_rng(SEED)
        found = [_ratio(sides, _draw(repeats, rng), statistic) for _ in range(draws)]
        known = [each for each in found if not math.isnan(each)]
        if known:
            low, high = (float(each) for each in np.percentile(known, (2.5, 97.5)))
    return Ratio(value, low, high, len(repeats), len(pairs))


class _Side:
    """The values of many programs in one array, so that a draw of programs is one look-up."""

    def __init__(self, programs: Sequence[Sequence[float]]) -> None:
        self._values = np.concatenate([np.asarray(each, float) for each in programs])
        self._lengths = np.array([len(each) for each in programs])
        self._starts = np.cumsum(self._lengths) - self._lengths

    def of(self, programs: Indices) -> Values:
        """All values of these programs, one program after the other."""
        lengths = self._lengths[programs]
        shifts = self._starts[programs] - (np.cumsum(lengths) - lengths)
        chosen: Values = self._values[np.repeat(shifts, lengths) + np.arange(lengths.sum())]
        return chosen


def _draw(repeats: list[Indices], rng: np.random.Generator) -> Indices:
    chosen = [repeats[each] for each in rng.integers(0, len(repeats), len(repeats))]
    return np.concatenate([each[rng.integers(0, len(each), len(each))] for each in chosen])


def _ratio(sides: tuple[_Side, _Side], programs: Indices, statistic: Statistic) -> float:
    base, other = (statistic(side.of(programs)) for side in sides)
    return other / base if base else math.nan


def mean(values: Values) -> float:
    """Arithmetic mean."""
    return float(values.mean())


def p95(values: Values) -> float:
    """The smallest value that at least 95 % of the values do not exceed."""
    return float(np.sort(values)[math.ceil(0.95 * len(values)) - 1])
