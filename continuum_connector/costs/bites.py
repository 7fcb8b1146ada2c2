"""Bites: a long computation as a generator, so that no engine step pays for all of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Bites: TypeAlias = Generator[None, None, T]  # some tens of microseconds between two yields


def whole(bites: Bites[T]) -> T:
    """All of it at once, for those who have the time."""
    end: list[T] = []

    def last() -> Generator[None, None, None]:
        end.append((yield from bites))

    for _ in last():
        pass
    return end[0]
