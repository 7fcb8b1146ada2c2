"""Averages of a list; nan of nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing."""
    return sum(values) / len(values) if values else math.nan


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed; nan of nothing."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else math.nan
