"""Verdict: what a cell's outcomes say of us, and whether the aims hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from bench.sim.cells import Cell
from bench.sim.outcome import Outcome

OURS, STOCK = "adaptive", "stock"
# Other policies on our connector: judged against, but no rivals.
RELATED = ("fixed_ttl", "continuum", "infercept", "contextserve", "lru_offload", "program_order")
MEAN_AIM, P99_AIM, STOCK_AIM, GAIN_AIM = 1.02, 1.05, 1.01, 0.90


@dataclass(frozen=True)
class Verdict:
    """One cell: mean and P99 of JCT by arm in seconds, each the mean over the seeds. Arms that
    know the future (their names begin with "oracle") are shown and never the best."""

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
        return {arm: value for arm, value in values.items() if not arm.startswith("oracle")}


def verdicts(cells: Iterable[Cell], outcomes: Iterable[Outcome]) -> list[Verdict]:
    """One per cell that ours and stock were run in, in the order of the cells. An arm counts in a
    cell with the seeds that every arm of the cell was run with."""
    by_cell: dict[str, dict[str, dict[int, Outcome]]] = defaultdict(lambda: defaultdict(dict))
    for each in outcomes:
        by_cell[each.cell][each.arm][each.seed] = each
    found = []
    for cell in cells:
        arms = by_cell.get(cell.name, {})
        if OURS in arms and STOCK in arms:
            seeds = set.intersection(*(set(runs) for runs in arms.values()))
            found.append(_verdict(cell, arms, seeds))
    return found


def _verdict(cell: Cell, arms: Mapping[str, Mapping[int, Outcome]], seeds: set[int]) -> Verdict:
    chosen = {arm: [runs[seed] for seed in sorted(seeds)] for arm, runs in arms.items()}
    return Verdict(
        cell,
        {arm: fmean(run.mean_s for run in runs) for arm, runs in chosen.items()},
        {arm: fmean(run.p99_s for run in runs) for arm, runs in chosen.items()},
    )
