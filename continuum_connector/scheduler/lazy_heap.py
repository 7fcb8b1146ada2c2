"""LazyHeap: the smallest of many items whose keys change while they are in the heap.

A binary heap can remove only its first item, and move none. Here an item that moves gets a new
entry, and an item that leaves gets none. The old entries are stale, and skipped when they come up.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = tuple[Any, ...]  # compared; of equal keys the one pushed first comes first


class LazyHeap(Generic[Item]):
    """`push`, `discard` and `first` take O(log n), and memory stays within twice the items."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._current: dict[Item, int] = {}  # item -> number of its live entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: Item) -> bool:
        return item in self._current

    def __iter__(self) -> Iterator[Item]:
        """The items, the smallest key first."""
        live = filter(self._is_current, self._entries)
        return (item for _, _, item in sorted(live, key=lambda entry: entry[:2]))

    @property
    def num_entries(self) -> int:
        """How many entries there are, including stale ones."""
        return len(self._entries)

    def push(self, key: Key, item: Item) -> None:
        """Insert the item, or move it if it is there."""
        number = next(self._numbers)
        self._current[item] = number
        heapq.heappush(self._entries, (key, number, item))
        if len(self._entries) > 64 + 2 * len(self._current):
            self._entries = list(filter(self._is_current, self._entries))
            heapq.heapify(self._entries)

    def discard(self, item: Item) -> None:
        """Take the item out, if it is there."""
        self._current.pop(item, None)

    def first(self) -> tuple[Key, Item] | None:
        """The smallest key and its item, which stays in the heap; None if the heap is empty."""
        while self._entries:
            key, number, item = self._entries[0]
            if self._current.get(item) == number:
                return key, item
            heapq.heappop(self._entries)
        return None

    def _is_current(self, entry: tuple[Key, int, Item]) -> bool:
        return self._current.get(entry[2]) == entry[1]
