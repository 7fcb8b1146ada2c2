"""Metric: one number that we publish."""

from __future__ import annotations

import enum
from dataclasses import dataclass

PREFIX = "continuum:"
OTHER = "other"  # the label value that stands for every value the code did not foresee
COPY_BUCKETS = (5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)


class Kind(enum.Enum):
    """The kinds of metrics, as Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"

    @property
    def part(self) -> str:
        """The part of a payload that holds this kind: "counters", "gauges" or "histograms"."""
        return self.value + "s"


@dataclass(frozen=True)
class Metric:
    """One published number. `label`: its values are the closed set `values`, never a request's
    text. `first`: a gauge's value before anything sets it."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    first: float = 0.0

    @property
    def full_name(self) -> str:
        """The name on /metrics, where Prometheus appends `_total` to a counter's."""
        return PREFIX + self.name

    @property
    def labels(self) -> tuple[str | None, ...]:
        """Every value that the label can take; a single None without a label."""
        return self.values or (None,)
