"""Which key to forget when there are too many, because clients may invent any number of names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

# Observations. A parent's curve counts as so many (tool_times.py): with fewer of its own, what
# is known of a key is mostly its parent's, and little is lost with it.
FEW = 8.0


def touch_and_evict(
    keys: OrderedDict[str, T], name: str, limit: int, num_seen: Callable[[T], float]
) -> None:
    """`name`, which is among `keys`, was seen just now; of more than `limit` one is forgotten.

    That is the least recently seen of those with FEW observations, else of all, but not `name`:
    a flood of new names pushes out itself, and a new tool still finds its place. Some 30 us
    at worst, for 256 keys.
    """
    keys.move_to_end(name)
    if len(keys) <= limit:
        return
    others = islice(keys.items(), len(keys) - 1)
    little_known = (key for key, value in others if num_seen(value) < FEW)
    del keys[next(little_known, next(iter(keys)))]
