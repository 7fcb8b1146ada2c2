"""The one table that compares the arms, and how many answers are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.common.tables import mean
from bench.serve.metrics import total
from bench.serve.results import Loaded
from bench.serve.summary import BY_KEY, PROMPT, pins_ended

NONE = "-"
Row = tuple[str, str, Callable[[Loaded], float], str, bool]  # key, title, value, unit, ratio?


def _ttft_s(run: Loaded, first: bool) -> float:
    """Of first turns or of later ones: program order may trade one for the other."""
    return mean([t.ttft_s for t in run.turns if not t.error and (t.turn == 0) == first])


def _count(name: str, **labels: str) -> Callable[[Loaded], float]:
    return lambda run: total(run.added, name, **labels)


ROWS: tuple[Row, ...] = (
    ("jct_mean_s", "JCT mean", BY_KEY["jct_mean_s"].value, "s", True),
    ("jct_p95_s", "JCT P95", BY_KEY["jct_p95_s"].value, "s", True),
    ("ttft_mean_s", "TTFT mean", BY_KEY["ttft_mean_s"].value, "s", True),
    ("ttft_p95_s", "TTFT P95", BY_KEY["ttft_p95_s"].value, "s", True),
    ("ttft_first_mean_s", "  first turns, mean", lambda run: _ttft_s(run, True), "s", True),
    ("ttft_later_mean_s", "  later turns, mean", lambda run: _ttft_s(run, False), "s", True),
    ("prompt_tokens", "prompt tokens", _count("vllm:prompt_tokens_total"), "", True),
    ("recomputed", "  computed", _count(PROMPT, source="local_compute"), "", True),
    ("hits_vram", "  hit in VRAM", _count(PROMPT, source="local_cache_hit"), "", True),
    ("hits_dram", "  hit in DRAM", _count(PROMPT, source="external_kv_transfer"), "", False),
    ("preemptions", "preemptions", _count("vllm:num_preemptions_total"), "", False),
    ("errors", "failed turns", BY_KEY["failed_turns"].value, "", False),
)


def make_table(title: str, arms: Sequence[Loaded]) -> Table:
    """One column per arm, and how each compares with the first."""
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for index, arm in enumerate(arms):
        table.add_column(arm.run.title, justify="right", overflow="fold")
        if index:
            table.add_column("ratio", justify="right", style="bold")
    base = arms[0]
    for _, name, value, unit, has_ratio in ROWS:
        ratios = [_ratio(value(arm), value(base)) if has_ratio else "" for arm in arms]
        table.add_row(name, *_beside([_number(value(arm), unit) for arm in arms], ratios))
    for name, text in (("pins, by how they ended", _pins), ("same outputs", _outputs)):
        table.add_row(name, *_beside([text(arm, base) for arm in arms], [""] * len(arms)))
    return table


def _beside(cells: Sequence[str], ratios: Sequence[str]) -> list[str]:
    """Each arm's cell and, but for the first arm's, its ratio."""
    pairs = zip(cells[1:], ratios[1:], strict=True)
    return [cells[0], *(each for pair in pairs for each in pair)]


def same_outputs(arm: Loaded, base: Loaded) -> tuple[int, int]:
    """Turns answered alike, of the turns the two arms have between them."""
    mine, theirs = (
        {(t.program, t.turn): t.text for t in run.turns if not t.error} for run in (arm, base)
    )
    return sum(mine.get(key) == text for key, text in theirs.items()), len(mine | theirs)


def as_json(arm: Loaded) -> dict[str, Any]:
    """Everything, for --json."""
    turns = [msgspec.to_builtins(turn) for turn in arm.turns]
    return {
        "label": arm.run.title,
        "wall_s": arm.run.wall_s,
        "server_start_s": arm.run.server_start_s,
        "summary": {key: value(arm) for key, _, value, *_ in ROWS},
        "pins_ended": _ended(arm),
        "programs": [
            {
                **msgspec.to_builtins(each),
                "turns": [turn for turn in turns if turn["program"] == each.program],
            }
            for each in arm.programs
        ],
        "counters": [
            {"name": name, "labels": dict(labels), "added": value}
            for (name, labels), value in sorted(arm.added.items(), key=str)
            if value and not name.endswith(("_created", "_bucket"))
        ],
    }


def _ended(arm: Loaded) -> dict[str, float]:
    """Pins by how they ended, the most first."""
    return {cause: n for cause, n in sorted(pins_ended(arm).items(), key=lambda c: -c[1]) if n}


def _outputs(arm: Loaded, base: Loaded) -> str:
    if arm is base:
        return NONE
    same, of = same_outputs(arm, base)
    return f"yes ({same}/{of})" if same == of else f"NO ({same}/{of})"


def _pins(arm: Loaded, _base: Loaded) -> str:
    if not arm.run.settings["connector"]:
        return NONE
    return "\n".join(f"{cause} {n:.0f}" for cause, n in _ended(arm).items()) or "none"


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return NONE
    return f"{value:.2f} {unit}" if unit else f"{value:,.0f}"


def _ratio(value: float, base: float) -> str:
    if math.isnan(value) or math.isnan(base) or not base:
        return ""
    return f"{value / base:.2f}x"
