"""Two ways to serve, compared in pairs: how many times as long, and how sure is that?

Runs of the same repeat got the same requests, so programs are compared with themselves: a repeat
is one ratio, and what is told is their geometric mean. The programs of a repeat share a server, a
machine and a load, so they are no independent observations, and only the ratios of whole repeats
tell how much a next one may differ: a t interval on their logarithms holds the true ratio in 95 %
of experiments. It needs repeats: below MIN_REPEATS none is told, for it would be as wide as the
question; and none of a P95 that rests on fewer than MIN_PROGRAMS_P95 programs, all repeats
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

MIN_REPEATS = 5
MIN_PROGRAMS_P95 = 100
LEVEL = 0.95
Sampled = Mapping[str, Sequence[float]]  # of one run: what was measured, by program
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Ratio:
    """other / base with its 95 % interval; nan where there is too little to tell."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x [{self.low:.2f}..{self.high:.2f}]"


NO_RATIO = Ratio(math.nan, math.nan, math.nan)


def paired_ratio(
    base: Sequence[Sampled], other: Sequence[Sampled], statistic: Statistic, min_programs: int = 0
) -> Ratio:
    """Compare runs that belong together: base[i] and other[i] got the same requests.

    A repeat where one side has nothing, or nothing above 0, is left out. There is no interval
    below MIN_REPEATS repeats and `min_programs` programs.
    """
    logs: list[float] = []
    num_programs = 0
    for ours, theirs in zip(base, other, strict=True):
        both = [name for name in ours if len(ours[name]) and len(theirs.get(name, ()))]
        first, second = (
            statistic([value for name in both for value in side[name]]) for side in (ours, theirs)
        )
        if first > 0 and second > 0:  # nan is not above 0 either
            logs.append(math.log(second / first))
            num_programs += len(both)
    if not logs:
        return NO_RATIO
    middle, half = fmean(logs), math.nan
    if len(logs) >= MIN_REPEATS and num_programs >= min_programs:
        half = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(*(math.exp(each) for each in (middle, middle - half, middle + half)))


def t_quantile(freedom: int) -> float:
    """Half the width of a two-sided t interval in standard errors.

    The expansion about the normal quantile (Abramowitz and Stegun, 26.7.5): from 4 degrees of
    freedom on within 0.1 %.
    """
    z, n = NormalDist().inv_cdf((1 + LEVEL) / 2), freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
