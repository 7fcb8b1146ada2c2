"""Clock: virtual time. Who moves it is the only one who takes time."""

from __future__ import annotations


class Clock:
    """Virtual monotonic seconds; moved by the lab alone."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
