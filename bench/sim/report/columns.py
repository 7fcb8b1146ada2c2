"""What a table says of an arm at a point: one list of columns for terminal and page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.common.tables import mean, quantile
from bench.sim.report.summary import Figures

GB = 1e9


@dataclass(frozen=True)
class Column:
    """`value`: what is shown, by `text`; `is_compared`: with its ratio to the first arm;
    `is_brief`: on a terminal too."""

    name: str
    value: Callable[[Figures], float]
    text: Callable[[float], str]
    is_compared: bool = False
    is_brief: bool = True


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 1 else f"{value:.2f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def times(value: float) -> str:
    return f"{value:.2f}x"


def _count(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value / 1e3:,.0f} k"


def _gb(value: float) -> str:
    return f"{value / GB:,.0f}" if value >= 10 * GB else f"{value / GB:.1f}"


COLUMNS = (
    Column("JCT mean s", lambda f: mean(f.jct_s), seconds, is_compared=True),
    Column("P95", lambda f: quantile(f.jct_s, 0.95), seconds),
    Column("P99", lambda f: quantile(f.jct_s, 0.99), seconds, is_compared=True),
    Column("TTFT mean s", lambda f: mean(f.ttft_s), seconds),
    Column("P99", lambda f: quantile(f.ttft_s, 0.99), seconds, is_brief=False),
    Column("computed", lambda f: f.total("num_computed_tokens"), _count, is_compared=True),
    Column("VRAM hits", lambda f: f.share("num_local_tokens"), percent),
    Column("DRAM hits", lambda f: f.share("num_external_tokens"), percent),
    Column("stored GB", lambda f: f.total("stored_bytes"), _gb),
    Column("loaded GB", lambda f: f.total("loaded_bytes"), _gb),
    Column("written GB", lambda f: f.total("written_bytes"), _gb, is_brief=False),
    Column("read GB", lambda f: f.total("read_bytes"), _gb, is_brief=False),
    Column("GPU busy", lambda f: f.busy, percent, is_brief=False),
)


def cells(arms: Mapping[str, Figures], arm: str) -> list[tuple[str, str]]:
    """Per column the arm's value and its ratio to the first arm, "" where there is none."""
    first = next(iter(arms.values()))
    found = []
    for column in COLUMNS:
        value, base = column.value(arms[arm]), column.value(first)
        is_compared = column.is_compared and arm != first.arm and base > 0
        text = "-" if math.isnan(value) else column.text(value)
        found.append((text, times(value / base) if is_compared else ""))
    return found
