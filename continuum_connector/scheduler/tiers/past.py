"""Past: what earlier epochs left in a table of slots, given back little by little.

A new epoch must not wait until the old one is taken apart: for a million blocks that alone takes a
second. So the old tables are laid aside whole, which costs nothing, and slots are taken out of them
a bite per step, or when they are needed. The table of an epoch that has a name may be kept until
then, so that the epoch can go on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.slots import Numbers

BITE = 1024  # slots, or entries of other containers laid aside, per step: 0.2 ms


@dataclass(frozen=True)
class Table:
    """What an epoch had: its keys' slots, all READY, and `order`, which says what leaves first,
    with `num_claims` on the slots; `queues`: the dictionaries in `order`."""

    numbers: dict[Key, int]
    order: Any
    num_claims: int
    queues: Sequence[Any]


class Past:
    """Tables of keys that are not found any more. Their slots are neither written nor read; they
    are passed to `give_back` when they are to be used again."""

    def __init__(self, give_back: Callable[[Numbers], None]) -> None:
        self.num = 0  # slots
        self.most_kept = 0  # epochs
        self._kept: OrderedDict[str, Table] = OrderedDict()  # the first goes first
        self._give_back = give_back
        self._tables: deque[dict[Key, int]] = deque()
        self._rubbish: deque[Any] = deque()  # dictionaries and sets that are no longer used

    def add(self, numbers: dict[Key, int], *rubbish: Any) -> None:
        """Lay a table aside, with other containers that are to be taken apart slowly."""
        self.num += len(numbers)
        if numbers:
            self._tables.append(numbers)
        self._rubbish.extend(filter(None, rubbish))

    def change(self, keep_as: str, table: Table, name: str) -> Table | None:
        """Lay the present table aside, and keep it as `keep_as` if it has that name and epochs are
        kept at all. Returns the table kept as `name`, which becomes the present one, or None."""
        if keep_as and self.most_kept and table.numbers:
            self.num += len(table.numbers)
            self._kept[keep_as] = table
        else:
            self.add(table.numbers, *table.queues)
        found = self._kept.pop(name, None)
        if found is not None:
            self.num -= len(found.numbers)
        if len(self._kept) > self.most_kept:
            self._forget_oldest()
        return found

    def yield_slots(self, num_wanted: int) -> None:
        """Give this many slots back, or as many as there are; a kept epoch goes as a whole."""
        while num_wanted > 0 and (self._tables or self._kept):
            if not self._tables:
                self._forget_oldest()
            num_wanted -= self._give(num_wanted)

    def _forget_oldest(self) -> None:
        _, table = self._kept.popitem(last=False)
        self.num -= len(table.numbers)
        self.add(table.numbers, *table.queues)

    def _give(self, num_wanted: int) -> int:
        taken: list[int] = []
        while self._tables and len(taken) < num_wanted:
            pop = self._tables[0].popitem
            num = min(num_wanted - len(taken), len(self._tables[0]))
            taken += [pop()[1] for _ in range(num)]
            if not self._tables[0]:
                self._tables.popleft()
        if taken:
            self.num -= len(taken)
            self._give_back(np.array(taken, np.int64))
        return len(taken)

    def tidy(self) -> None:
        """Take a bite of what is laid aside; called once a step."""
        if not (self._tables or self._rubbish):
            return
        self._give(BITE)
        num_entries = BITE
        while self._rubbish and num_entries:
            box = self._rubbish[0]
            num = min(num_entries, len(box))
            num_entries -= num
            pop = box.pop if isinstance(box, set) else box.popitem
            for _ in range(num):
                pop()
            if not box:
                self._rubbish.popleft()

    def slots(self) -> Numbers:
        """All slots laid aside; O(slots), for tests."""
        tables = [*self._tables, *(table.numbers for table in self._kept.values())]
        return np.array([n for table in tables for n in table.values()], np.int64)
