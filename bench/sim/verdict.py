"""Verdict: what a cell's outcomes say of us, and whether the aims hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from bench.common.arms import OURS, STOCK, Role
from bench.sim.arms import role_of
from bench.sim.cells import Cell
from bench.sim.result import RunRecord

MEAN_AIM, P99_AIM, STOCK_AIM, GAIN_AIM = 1.02, 1.05, 1.01, 0.90
P99_PROGRAMS = 100  # of fewer, the P99 is the slowest one: shown, not judged


@dataclass(frozen=True)
class Verdict:
    """One cell: JCT by arm in seconds, the mean of the seeds' means and the P99 of their programs
    together. Oracles are shown and never the best.

    `num_programs`: over all seeds; `busy`: share of our runs' time in which the GPU computes;
    `failed`: arms of which a run failed, and why. Such an arm has no mean, and every ratio to it
    is NaN.
    """

    cell: Cell
    mean_s: dict[str, float]
    p99_s: dict[str, float]
    num_programs: int = 0
    busy: float = math.nan
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The arm with the least mean; of equal ones the first in the order of arms; "" if all
        failed."""
        fair = _fair(self.mean_s)
        return min(fair, key=fair.__getitem__, default="")

    @property
    def to_best(self) -> float:
        """Ours over the least mean JCT."""
        return _over_least(self.mean_s)

    @property
    def to_best_p99(self) -> float:
        """Ours over the least P99."""
        return _over_least(self.p99_s)

    @property
    def judges_p99(self) -> bool:
        """Whether there are enough programs for a P99."""
        return self.num_programs >= P99_PROGRAMS

    @property
    def holds_p99(self) -> bool:
        return self.to_best_p99 <= P99_AIM

    @property
    def to_stock(self) -> float:
        """Ours over plain vLLM's mean."""
        return self.mean_s.get(OURS, math.nan) / self.mean_s.get(STOCK, math.nan)

    @property
    def to_rival(self) -> float | None:
        """Ours over the best mean of what is not ours; None if no such arm was run."""
        rivals = {k: v for k, v in self.mean_s.items() if k == OURS or is_rival(k)}
        return _over_least(rivals, but=OURS) if set(rivals) - {OURS} else None

    @property
    def holds(self) -> bool:
        """Whether the cell's aim is reached; not if a run of ours failed."""
        if self.cell.aim == "stock":
            return self.to_stock <= STOCK_AIM
        return self.to_best <= MEAN_AIM and (self.holds_p99 or not self.judges_p99)


def is_rival(arm: str) -> bool:
    """Whether a server without our connector could run it, or the paper's did."""
    return role_of(arm) is Role.RIVAL


def _fair(values: Mapping[str, float]) -> dict[str, float]:
    return {arm: value for arm, value in values.items() if role_of(arm) is not Role.ORACLE}


def _over_least(values: Mapping[str, float], but: str = "") -> float:
    """Ours over the least of all but oracles and `but`; NaN if there is none of either."""
    others = [value for arm, value in _fair(values).items() if arm != but]
    return values.get(OURS, math.nan) / min(others, default=math.nan)


def percentile(values: Iterable[float], percent: int) -> float:
    """Nearest rank: P99 of fewer than a hundred values is the largest."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1]


def verdict(
    cell: Cell,
    runs: Mapping[str, Mapping[int, RunRecord]],
    failed: Mapping[str, str] | None = None,
) -> Verdict | None:
    """Judge a cell by its runs, by arm and seed. An arm counts with the seeds that all arms were
    run with, and not at all if one of its runs `failed`; None if nothing was run."""
    failed = dict(failed or {})
    runs = {arm: by_seed for arm, by_seed in runs.items() if arm not in failed}
    seeds = set.intersection(*(set(by_seed) for by_seed in runs.values())) if runs else set()
    if not seeds and not failed:
        return None
    records = {arm: [by_seed[s] for s in sorted(seeds)] for arm, by_seed in runs.items() if seeds}
    jct = {arm: [list(one.jct_s.values()) for one in each] for arm, each in records.items()}
    return Verdict(
        cell,
        {arm: fmean(map(fmean, each)) for arm, each in jct.items()},
        {arm: percentile(chain(*each), 99) for arm, each in jct.items()},
        num_programs=max((sum(map(len, each)) for each in jct.values()), default=0),
        busy=fmean([one.busy_s / one.span_s for one in records.get(OURS, [])] or [math.nan]),
        failed=failed,
    )
