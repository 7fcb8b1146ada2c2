"""Sample: mean and percentiles of any number of values, in bounded memory."""

from __future__ import annotations

import random

MAX_KEPT = 100_000  # values; up to so many, percentiles are exact


class Sample:
    """Beyond MAX_KEPT percentiles are those of a uniform sample, the same one every time."""

    def __init__(self) -> None:
        self.num = 0
        self.total = 0.0
        self._kept: list[float] = []
        self._is_sorted = True
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value
        self._is_sorted = False
        if len(self._kept) < MAX_KEPT:
            self._kept.append(value)
        elif (place := self._random.randrange(self.num)) < MAX_KEPT:
            self._kept[place] = value

    @property
    def mean(self) -> float | None:
        return self.total / self.num if self.num else None

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` lies, linear between two; None without values."""
        if not self._kept:
            return None
        if not self._is_sorted:
            self._kept.sort()
            self._is_sorted = True
        place = q * (len(self._kept) - 1)
        low = int(place)
        high = min(low + 1, len(self._kept) - 1)
        return self._kept[low] + (place - low) * (self._kept[high] - self._kept[low])
