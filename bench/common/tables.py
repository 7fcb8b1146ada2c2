"""What tables are made of: averages of a list, nan of nothing; and columns, as many as fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ANY_WIDTH = 10_000
Item = TypeVar("Item")


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values) if values else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else math.nan


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [columns, *rows]
    head, *rest = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *rest])


def fitting(
    console: Console, columns: Sequence[Item], make: Callable[[Sequence[Item]], Table]
) -> Iterator[Table]:
    """Tables of as many of the columns as fit into the terminal, one at least, in their order:
    those that do not fit beside the others go below them, uncut."""
    shown: list[Item] = []
    for column in columns:
        if shown and _width(console, make([*shown, column])) > console.width:
            yield make(shown)
            shown = []
        shown.append(column)
    if shown:
        yield make(shown)


def _width(console: Console, table: Table) -> int:
    """What it takes if nothing is folded."""
    return Measurement.get(console, console.options.update_width(ANY_WIDTH), table).maximum
