"""Sections: what one question of the bench found, as a table, as targets and as raw samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.common.tables import markdown

Say = Callable[[str], None]  # what is measured now


@dataclass(frozen=True)
class Target:
    """An aim and what was found; information, never a verdict on the program."""

    text: str
    found: float
    limit: float
    unit: str
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        word = "PASS" if self.is_met else "FAIL"
        return f"{word}  {self.text}: {self.found:.1f} {self.unit}, aim {sign} {self.limit:g}"


@dataclass
class Section:
    """One table. `rows` are the cells as shown, `samples` every number they came from."""

    name: str
    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def markdown(self) -> str:
        """Title, table, note and targets."""
        lines = [f"**{self.title}**", "", markdown(self.header, self.rows)]
        if self.note:
            lines += ["", self.note]
        if self.targets:
            lines += ["", *(f"    {target}" for target in self.targets)]
        return "\n".join(lines)


def spread(samples: Sequence[float], high: float = 99) -> tuple[str, str, str]:
    """Median, a high percentile and the maximum, as cells."""
    middle, top = np.percentile(samples, [50, high])
    return f"{middle:.2f}", f"{top:.2f}", f"{max(samples):.2f}"


def size(num_bytes: int) -> str:
    """4096 -> 4 KiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes} B"
