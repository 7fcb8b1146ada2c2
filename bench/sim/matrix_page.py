"""The matrix's page: winners per cell for all arms, the aims, and where we are not the best."""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.verdict import GAIN_AIM, MEAN_AIM, OURS, P99_AIM, STOCK_AIM, Verdict


def page(
    verdicts: Sequence[Verdict], command: str, seeds: Sequence[int], num_missing: int = 0
) -> str:
    """Return MATRIX.md: what `command` found with these seeds; `num_missing`: cells that were
    stopped before all of their runs were done."""
    missing = f" **{num_missing} cells are not here: the run was stopped.**" if num_missing else ""
    parts = [
        "# The scenario matrix",
        f"`{command}`, seeds {', '.join(map(str, seeds))}. What the cells are: `matrix.toml`.",
        "Mean JCT in seconds, of an arm over the best one; **bold**: the best. Simulated: see "
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
    gains = [v for v in best if v.to_rival is not None and v.to_rival <= GAIN_AIM]
    rows = [
        (f"mean JCT at most {MEAN_AIM:g}x the best arm's", best, lambda v: v.to_best <= MEAN_AIM),
        (f"P99 at most {P99_AIM:g}x the best arm's", best, lambda v: v.to_best_p99 <= P99_AIM),
        (f"nothing to be won: at most {STOCK_AIM:g}x stock", stock, lambda v: v.holds),
    ]
    lines = ["| aim | holds in |", "|---|---|"]
    lines += [f"| {aim} | {sum(map(test, cells))} of {len(cells)} |" for aim, cells, test in rows]
    percent = round((1 - GAIN_AIM) * 100)
    lines.append(
        f"| {percent} % better than the best rival, in half | {len(gains)} of {len(best)} |"
    )
    return "\n".join(lines)


def _table(verdicts: Sequence[Verdict]) -> str:
    arms = list(dict.fromkeys(arm for v in verdicts for arm in v.mean_s))
    head = ["cell", "best, s", *arms, "P99 to best", "to stock", "to best rival"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for v in verdicts:
        best = v.mean_s[v.winner]
        ratios = [_ratio(v.mean_s.get(arm), best, arm == v.winner) for arm in arms]
        rival = "" if v.to_rival is None else f"{v.to_rival:.2f}"
        tail = [f"{v.to_best_p99:.2f}", f"{v.to_stock:.2f}", rival]
        lines.append("| " + " | ".join([v.cell.name, f"{best:.2f}", *ratios, *tail]) + " |")
    return "\n".join(lines)


def _ratio(value: float | None, best: float, is_best: bool) -> str:
    if value is None:
        return ""
    text = f"{value / best:.2f}"
    return f"**{text}**" if is_best else text


def _lost(verdicts: Sequence[Verdict]) -> str:
    lost = sorted((v for v in verdicts if not v.holds), key=lambda v: -v.to_best)
    lines = [
        f"| cell | {OURS} to best | P99 | to stock | best | reason |",
        "|---|---|---|---|---|---|",
    ]
    for v in lost:
        ratios = f"{v.to_best:.3f} | {v.to_best_p99:.3f} | {v.to_stock:.3f}"
        lines.append(f"| {v.cell.name} | {ratios} | {v.winner} | {v.cell.reason or 'not known'} |")
    return "\n".join(lines) if lost else "Nowhere."
