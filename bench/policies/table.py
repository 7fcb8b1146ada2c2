"""From the lines of a run file to one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isnan, nan
from pathlib import Path
from statistics import mean, median
from typing import Any

from continuum_connector.tools.cli.ending import ToldError

ORDER = (
    *("pressure", "room"),
    *("fast", "coding", "person"),
    *("stock", "program_order", "fixed_ttl", "continuum", "adaptive"),
)
Key = tuple[str, str, str, int]  # pressure, regime, policy, seed
Runs = dict[Key, Mapping[str, Any]]


def load(path: Path) -> Runs:
    """Every run in the file; of two with the same key the later one."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        records = [json.loads(line) for line in lines if line.strip()]
        return {(r["pressure"], r["regime"], r["policy"], r["seed"]): r for r in records}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ToldError(
            f"{path} was not written by this bench ({said}); give another --out"
        ) from None


def render(runs: Runs) -> str:
    """Per pool and regime one block of rows; ratios are to `stock` with the same seed."""
    rows = [
        "| pool | gaps | policy | JCT mean s | of stock | slowest s | tokens computed | of stock "
        "| recomputed | hit VRAM | hit DRAM | pins back / given up / expired | same answers "
        "| failed, preempted |",
        "|---" * 14 + "|",
    ]
    groups = sorted({key[:3] for key in runs}, key=lambda group: [ORDER.index(w) for w in group])
    rows += [_row(runs, *group) for group in groups]
    return "\n".join(rows)


def _row(runs: Runs, pressure: str, regime: str, policy: str) -> str:
    mine = {seed: r for (*group, seed), r in runs.items() if group == [pressure, regime, policy]}
    stock = {seed: runs.get((pressure, regime, "stock", seed)) for seed in mine}
    pairs = [(run, stock[seed]) for seed, run in mine.items() if stock[seed]]

    def each(value: Callable[[Mapping[str, Any]], float]) -> list[float]:
        return [value(run) for run in mine.values()]

    def ratio(value: Callable[[Mapping[str, Any]], float]) -> list[float]:
        return [value(run) / value(base) for run, base in pairs if base and value(base)]

    ends = [run["pins_ended"] for run in mine.values()]
    pins = " / ".join(
        f"{sum(end.get(cause, 0) for end in ends):.0f}"
        for cause in ("returned", "pressure", "expired")
    )
    same, turns = _same_answers(runs, mine, regime)
    cells = [
        pressure,
        regime,
        policy,
        _spread(each(_jct), "{:.2f}"),
        _spread(ratio(_jct), "{:.2f}x"),
        _spread(each(lambda r: max(r["jct_s"], default=nan)), "{:.1f}"),
        _spread(each(lambda r: r["computed"]), "{:,.0f}"),
        _spread(ratio(lambda r: r["computed"]), "{:.2f}x"),
        _spread(_recomputed(runs, mine, regime), "{:,.0f}"),
        f"{median(each(lambda r: r['vram'] / r['prompt_tokens'])):.0%}",
        f"{median(each(lambda r: r['dram'] / r['prompt_tokens'])):.0%}",
        pins if policy not in ("stock", "program_order") else "-",
        f"{same}/{turns}",
        f"{sum(each(lambda r: r['failed'])):.0f}, {sum(each(lambda r: r['preemptions'])):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _same_answers(
    runs: Runs, mine: Mapping[int, Mapping[str, Any]], regime: str
) -> tuple[int, int]:
    """Turns answered as stock vLLM answers them where there is room, of how many."""
    same = turns = 0
    for seed, run in mine.items():
        base = runs.get(("room", regime, "stock", seed))
        if base:
            turns += len(base["answers"])
            same += sum(run["answers"].get(key) == text for key, text in base["answers"].items())
    return same, turns


def _recomputed(runs: Runs, mine: Mapping[int, Mapping[str, Any]], regime: str) -> list[float]:
    """Prompt tokens computed beyond what stock vLLM computes of the same words where all fits."""
    bases = {seed: runs.get(("room", regime, "stock", seed)) for seed in mine}
    return [run["computed"] - base["computed"] for s, run in mine.items() if (base := bases[s])]


def _jct(run: Mapping[str, Any]) -> float:
    """Mean over the programs; nan where one failed, for its time says nothing."""
    return nan if run["failed"] else mean(run["jct_s"])


def _spread(values: list[float], form: str) -> str:
    """Median, and the range in brackets; "-" where a value is missing."""
    if not values or any(isnan(value) for value in values):
        return "-"
    low, high = (form.format(value) for value in (min(values), max(values)))
    return f"{form.format(median(values))} [{low}..{high}]"
