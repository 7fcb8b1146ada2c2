"""Verdict: what a cell's outcomes say of us, whether the aims hold; and the page that says it:
winners per cell for all arms, the aims, and where we are not the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from bench.common.arms import OURS, STOCK, Role
from bench.common.tables import markdown, quantile
from bench.sim.arms import ARMS
from bench.sim.cells import Cell
from bench.sim.job import RunRecord

MEAN_AIM, P99_AIM, STOCK_AIM, GAIN_AIM = 1.02, 1.05, 1.01, 0.90
P99_PROGRAMS = 100  # of fewer, the P99 is the slowest one: shown, not judged


@dataclass(frozen=True)
class Verdict:
    """One cell: JCT by arm in seconds, the mean of the seeds' means and the P99 of their programs
    together. Oracles are shown and never the best.

    `num_programs`: over all seeds; `busy`: share of our runs' time in which the GPU computes. Of an
    arm that was not run every ratio is NaN.
    """

    cell: Cell
    mean_s: dict[str, float]
    p99_s: dict[str, float]
    num_programs: int = 0
    busy: float = math.nan

    @property
    def winner(self) -> str:
        """The arm with the least mean; of equal ones the first in the order of arms."""
        fair = _fair(self.mean_s)
        return min(fair, key=fair.__getitem__)

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
        """Whether the cell's aim is reached."""
        if self.cell.aim == "stock":
            return self.to_stock <= STOCK_AIM
        return self.to_best <= MEAN_AIM and (self.holds_p99 or not self.judges_p99)


def is_rival(arm: str) -> bool:
    """Whether a server without our connector could run it, or the paper's did."""
    return ARMS[arm].role is Role.RIVAL


def _fair(values: Mapping[str, float]) -> dict[str, float]:
    return {arm: value for arm, value in values.items() if ARMS[arm].role is not Role.ORACLE}


def _over_least(values: Mapping[str, float], but: str = "") -> float:
    """Ours over the least of all but oracles and `but`; NaN if there is none of either."""
    others = [value for arm, value in _fair(values).items() if arm != but]
    return values.get(OURS, math.nan) / min(others, default=math.nan)


def verdict(cell: Cell, runs: Mapping[str, Mapping[int, RunRecord]]) -> Verdict:
    """Judge a cell by its runs, by arm and seed, of which there is one at least."""
    jct = {
        arm: [list(one.jct_s.values()) for one in by_seed.values()] for arm, by_seed in runs.items()
    }
    ours = runs.get(OURS, {}).values()
    return Verdict(
        cell,
        {arm: fmean(map(fmean, each)) for arm, each in jct.items()},
        {arm: quantile([*chain(*each)], 0.99) for arm, each in jct.items()},
        num_programs=max(sum(map(len, each)) for each in jct.values()),
        busy=fmean(one.busy_s / one.span_s for one in ours) if ours else math.nan,
    )


# --- the page, MATRIX.md ----------------------------------------------------------------------
def origin(
    command: str, seeds: Sequence[int], arms: Sequence[str], code: str, versions: Mapping[str, str]
) -> str:
    """Where the numbers come from. `code`, `versions`: as in provenance.py."""
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    rivals = ", ".join(filter(is_rival, arms)) or "none"
    return (
        f"`{command}`; seeds {', '.join(map(str, seeds))}; code {code}; {told}. "
        f"Arms: {', '.join(arms)}. Rivals, which are not ours: {rivals}. What the cells are: "
        "`matrix.toml`."
    )


def page(verdicts: Sequence[Verdict], origin: str, num_missing: int = 0) -> str:
    """Return MATRIX.md; `num_missing`: cells of which a run failed, or was not come to."""
    missing = f" **{num_missing} cells are not here: not all ran.**" if num_missing else ""
    parts = [
        "# The scenario matrix",
        origin,
        "Mean JCT in seconds, of an arm over the best one; **bold**: the best; -: it did not "
        f"run. P99 in brackets: fewer than {P99_PROGRAMS} programs, so it is the slowest one "
        f"and not judged. Busy: share of {OURS}'s time in which the GPU computes. Simulated: see "
        f"README.md for what that can and cannot say.{missing}",
        _aims(verdicts),
        "## Mean JCT",
        _table(verdicts),
        "## Where ours is not within the aim",
        _lost(verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def _aims(verdicts: Sequence[Verdict]) -> str:
    best = [v for v in verdicts if v.cell.aim == "best"]
    stock = [v for v in verdicts if v.cell.aim == "stock"]
    tails = [v for v in best if v.judges_p99]
    gains = [v for v in best if v.to_rival is not None and v.to_rival <= GAIN_AIM]
    rows = [
        (f"mean JCT at most {MEAN_AIM:g}x the best arm's", best, lambda v: v.to_best <= MEAN_AIM),
        (f"P99 at most {P99_AIM:g}x the best arm's", tails, lambda v: v.holds_p99),
        (f"nothing to be won: at most {STOCK_AIM:g}x stock", stock, lambda v: v.holds),
    ]
    held = [(aim, f"{sum(map(test, cells))} of {len(cells)}") for aim, cells, test in rows]
    percent = round((1 - GAIN_AIM) * 100)
    last = f"{percent} % better than the best rival, in half", f"{len(gains)} of {len(best)}"
    return markdown(("aim", "holds in"), [*held, last])


def _table(verdicts: Sequence[Verdict]) -> str:
    arms = list(dict.fromkeys(arm for v in verdicts for arm in v.mean_s))
    head = ["cell", "busy", "best, s", *arms, "P99 to best", "to stock", "to best rival"]
    rows = []
    for v in verdicts:
        best = v.mean_s[v.winner]
        ratios = [_ratio(v.mean_s.get(arm, math.nan), best, arm == v.winner) for arm in arms]
        rival = "" if v.to_rival is None else _number(v.to_rival)
        busy = "-" if math.isnan(v.busy) else f"{v.busy:.0%}"
        tail = [_p99(v), _number(v.to_stock), rival]
        rows.append([v.cell.name, busy, _number(best), *ratios, *tail])
    return markdown(head, rows)


def _ratio(value: float, best: float, is_best: bool) -> str:
    text = _number(value / best)
    return f"**{text}**" if is_best else text


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _p99(v: Verdict, digits: int = 2) -> str:
    text = _number(v.to_best_p99, digits)
    return text if v.judges_p99 or text == "-" else f"({text})"


def _lost(verdicts: Sequence[Verdict]) -> str:
    lost = [v for v in verdicts if not v.holds]
    lost.sort(key=lambda v: -math.inf if math.isnan(v.to_best) else -v.to_best)
    rows = []
    for v in lost:
        ratios = _number(v.to_best, 3), _p99(v, 3), _number(v.to_stock, 3)
        rows.append((v.cell.name, *ratios, v.winner, v.cell.reason or "not known"))
    head = ("cell", f"{OURS} to best", "P99", "to stock", "best", "reason")
    return markdown(head, rows) if lost else "Nowhere."
