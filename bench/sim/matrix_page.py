"""The matrix's page: winners per cell for all arms, the aims, and where we are not the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.common.arms import OURS
from bench.common.tables import markdown
from bench.sim.verdict import (
    GAIN_AIM,
    MEAN_AIM,
    P99_AIM,
    P99_PROGRAMS,
    STOCK_AIM,
    Verdict,
    is_rival,
)


def origin(
    command: str, seeds: str, arms: Sequence[str], code: str, versions: Mapping[str, str]
) -> str:
    """Where the numbers come from. `seeds`: in words; `code`, `versions`: as in provenance.py."""
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    rivals = ", ".join(filter(is_rival, arms)) or "none"
    return (
        f"`{command}`; seeds {seeds}; code {code}; {told}. Arms: {', '.join(arms)}. Rivals, which "
        f"are not ours: {rivals}. What the cells are: `matrix.toml`."
    )


def page(verdicts: Sequence[Verdict], origin: str, num_missing: int = 0) -> str:
    """Return MATRIX.md; `num_missing`: cells that were stopped before all of their runs were
    tried."""
    missing = f" **{num_missing} cells are not here: the run was stopped.**" if num_missing else ""
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
        "## What did not run",
        _failed(verdicts),
        "## Where ours is not within the aim",
        _lost(verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def _aims(verdicts: Sequence[Verdict]) -> str:
    best = [v for v in verdicts if v.cell.aim == "best"]
    stock = [v for v in verdicts if v.cell.aim == "stock"]
    tails = [v for v in best if v.judges_p99 or v.failed.get(OURS)]
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
    arms = list(dict.fromkeys(arm for v in verdicts for arm in (*v.mean_s, *v.failed)))
    head = ["cell", "busy", "best, s", *arms, "P99 to best", "to stock", "to best rival"]
    rows = []
    for v in verdicts:
        best = v.mean_s.get(v.winner, math.nan)
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


def _failed(verdicts: Sequence[Verdict]) -> str:
    rows = [
        (v.cell.name, arm, " ".join(why.split()).replace("|", "/"))
        for v in verdicts
        for arm, why in v.failed.items()
    ]
    return markdown(("cell", "arm", "reason"), rows) if rows else "None."


def _lost(verdicts: Sequence[Verdict]) -> str:
    lost = [v for v in verdicts if not v.holds]
    lost.sort(key=lambda v: -math.inf if math.isnan(v.to_best) else -v.to_best)
    rows = []
    for v in lost:
        ratios = _number(v.to_best, 3), _p99(v, 3), _number(v.to_stock, 3)
        why = "a run of ours failed, see above" if OURS in v.failed else v.cell.reason
        rows.append((v.cell.name, *ratios, v.winner, why or "not known"))
    head = ("cell", f"{OURS} to best", "P99", "to stock", "best", "reason")
    return markdown(head, rows) if lost else "Nowhere."
