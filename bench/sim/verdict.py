"""Verdict: what a cell's outcomes say of us, and whether the aims hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from bench.sim.cells import Cell
from bench.sim.result import RunRecord

OURS, STOCK = "adaptive", "stock"
# Other policies on our connector: judged against, but no rivals.
RELATED = ("fixed_ttl", "continuum", "infercept", "contextserve", "lru_offload", "program_order")
ORACLES = ("oracle", "infinite")  # know the future, or have room for everything
MEAN_AIM, P99_AIM, STOCK_AIM, GAIN_AIM = 1.02, 1.05, 1.01, 0.90


@dataclass(frozen=True)
class Verdict:
    """One cell: mean and P99 of JCT by arm in seconds, each the mean over the seeds. Oracles are
    shown and never the best."""

    cell: Cell
    mean_s: dict[str, float]
    p99_s: dict[str, float]

    @property
    def winner(self) -> str:
        """The arm with the least mean; of equal ones the first in the order of arms."""
        return min(self._fair(self.mean_s), key=self.mean_s.__getitem__)

    @property
    def to_best(self) -> float:
        """Ours over the least mean JCT."""
        return self.mean_s[OURS] / self.mean_s[self.winner]

    @property
    def to_best_p99(self) -> float:
        """Ours over the least P99."""
        return self.p99_s[OURS] / min(self._fair(self.p99_s).values())

    @property
    def to_stock(self) -> float:
        """Ours over plain vLLM's mean."""
        return self.mean_s[OURS] / self.mean_s[STOCK]

    @property
    def to_rival(self) -> float | None:
        """Ours over the best mean of what is not ours; None if no such arm was run."""
        rivals = {k: v for k, v in self._fair(self.mean_s).items() if k not in (OURS, *RELATED)}
        return self.mean_s[OURS] / min(rivals.values()) if rivals else None

    @property
    def holds(self) -> bool:
        """Whether the cell's aim is reached."""
        if self.cell.aim == "stock":
            return self.to_stock <= STOCK_AIM
        return self.to_best <= MEAN_AIM and self.to_best_p99 <= P99_AIM

    def _fair(self, values: Mapping[str, float]) -> dict[str, float]:
        return {arm: value for arm, value in values.items() if arm not in ORACLES}


def percentile(values: Iterable[float], percent: int) -> float:
    """Nearest rank: P99 of fewer than a hundred values is the largest."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1]


def verdict(cell: Cell, runs: Mapping[str, Mapping[int, RunRecord]]) -> Verdict | None:
    """Judge a cell by its runs, by arm and seed. An arm counts with the seeds that all arms were
    run with; None if there is none, or ours or stock was not run."""
    seeds = set.intersection(*(set(by_seed) for by_seed in runs.values())) if runs else set()
    if not seeds or OURS not in runs or STOCK not in runs:
        return None
    jct = {
        arm: [list(by_seed[seed].jct_s.values()) for seed in sorted(seeds)]
        for arm, by_seed in runs.items()
    }
    return Verdict(
        cell,
        {arm: fmean(map(fmean, each)) for arm, each in jct.items()},
        {arm: fmean(percentile(values, 99) for values in each) for arm, each in jct.items()},
    )
