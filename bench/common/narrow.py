"""Tables in a terminal: columns that do not fit beside the others go below them, uncut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ANY_WIDTH = 10_000
Item = TypeVar("Item")


def fitting(
    console: Console, columns: Sequence[Item], make: Callable[[Sequence[Item]], Table]
) -> Iterator[Table]:
    """Tables of as many of the columns as fit, one at least, in their order."""
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
