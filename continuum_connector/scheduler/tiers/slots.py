"""Slots: the places of blocks in host memory, as columns of numbers, and what a turn keeps there.

A transfer has up to 10^4 blocks, and DRAM has 10^6: an object per block would cost more than all
else that a step does, and the garbage collector would look at each. So a batch of slots is an
array, and work on a batch is work on columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from continuum_connector.scheduler.kv_groups import Key, Numbers

# Program, and when a chain of it was last used -> its rank among those that are live.
Rank = Callable[[str, float], float]
# A slot's number in the lower 32 bits; above them, how often it was forgotten before. So a block's
# ticket shows whether the slot holds another block by now.
Tickets = Numbers

_GROUP_BYTES = 4
_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_MASK = np.array(_NUMBER_MASK)  # numpy takes longer to make an array of an int than to use it
NO_TICKETS: Tickets = np.empty(0, np.int64)
TICKET_BYTES = 8


def numbers_of(tickets: Tickets) -> Numbers:
    """The numbers of these tickets' slots."""
    return np.asarray(tickets & _MASK)


@dataclass(eq=False, slots=True)
class Chain:
    """The blocks of one turn that are in DRAM, head first; it leaves tail first.

    Two chains with a common prefix claim the same slots. `last_used`: when a turn that continues it
    last stored or loaded, monotonic seconds. `num_prompt`: how many of its blocks the turn's prompt
    had, the answer's come after them; 0 if nobody knows.
    """

    program: str
    last_used: float
    tickets: Tickets = field(default_factory=NO_TICKETS.copy)
    num_prompt: int = 0

    def claim(self, tickets: Tickets) -> None:
        """Claim these slots and no others."""
        self.tickets = tickets

    def use(self, now: float) -> None:
        """A turn that continues it has stored or loaded."""
        self.last_used = now

    def cut(self, num_claims: int) -> None:
        """Let go of so many claims at the tail. A copy: a view would keep the bytes of them all."""
        self.tickets = self.tickets[: len(self.tickets) - num_claims].copy()


class FreeSlots:
    """Slots that hold nothing; those freed last are taken first. `away`: not to be taken yet."""

    def __init__(self) -> None:
        self.num = 0
        self.away: Numbers = np.empty(0, np.int64)
        self._numbers: Numbers = np.empty(0, np.int64)
        self._end = 0  # slots from here on are away

    def grow(self, first: int, last: int) -> None:
        """Slots from `first` to `last` - 1 exist now; they are taken in order, after the others."""
        new = np.arange(last - 1, first - 1, -1)
        self._numbers = np.concatenate([new, self._numbers])  # as long as there are slots in all
        self.num += len(new)
        self._end = max(self._end, last)

    def end_at(self, end: int) -> None:
        """Slots from `end` on are away; those before it are not."""
        is_less, self._end = end < self._end, end
        if is_less or len(self.away):
            numbers = np.concatenate([self.away, self._numbers[: self.num]])
            self.num, self.away = 0, np.empty(0, np.int64)
            self.put(numbers)

    def put(self, numbers: Numbers) -> None:
        if self._end < len(self._numbers):
            self.away = np.concatenate([self.away, numbers[numbers >= self._end]])
            numbers = numbers[numbers < self._end]
        self._numbers[self.num : self.num + len(numbers)] = numbers
        self.num += len(numbers)

    def take(self, num_wanted: int) -> Numbers:
        """Return this many slots, or as many as there are."""
        first = max(0, self.num - num_wanted)
        taken: Numbers = self._numbers[first : self.num][::-1].copy()
        self.num = first
        return taken

    def remove(self, numbers: Numbers) -> None:
        """These slots hold something after all. The cost grows with the number of free slots."""
        left = self._numbers[: self.num]
        left = left[~np.isin(left, numbers)]
        self.num = len(left)
        self._numbers[: self.num] = left


class SlotTable:
    """The state of every slot; the caller that changes it keeps the counts (HostIndex).

    A slot that was forgotten while it was written or read keeps that state until that is over, so
    its number is not used for another block meanwhile.
    """

    def __init__(self) -> None:
        self.tickets: Tickets = NO_TICKETS.copy()  # of what each slot holds, or will hold next
        self.keys: npt.NDArray[np.object_] = np.empty(0, object)
        self.is_writing = np.empty(0, np.bool_)
        self.num_readers = np.empty(0, np.int32)
        self.num_chains = np.empty(0, np.int32)  # that claim it; it leaves with the last
        self._is_marked = np.empty(0, np.bool_)

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = num_slots - len(self.tickets)
        new = np.arange(len(self.tickets), num_slots, dtype=np.int64)
        self.tickets = np.concatenate([self.tickets, new])
        self.keys = np.concatenate([self.keys, np.empty(more, object)])
        for name in ("is_writing", "num_readers", "num_chains", "_is_marked"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def are_there(self, tickets: Tickets) -> npt.NDArray[np.bool_]:
        """Which of them were not forgotten."""
        return np.asarray(self.tickets[numbers_of(tickets)] == tickets)

    def are_ready(self, tickets: Tickets) -> npt.NDArray[np.bool_]:
        """Which of them can be read."""
        return np.asarray(self.are_there(tickets) & ~self.is_writing[numbers_of(tickets)])

    def is_stuck(self, chain: Chain) -> bool:
        """Whether its last slot is busy and claimed by no other chain, so that nothing leaves."""
        if not chain.tickets.size:
            return False
        ticket = int(chain.tickets[-1])
        number = ticket & _NUMBER_MASK
        if not (self.is_writing[number] or self.num_readers[number]):  # dozens of checks per store
            return False
        return bool(self.num_chains[number] == 1 and self.tickets[number] == ticket)

    def claim(self, numbers: Numbers, keys: Sequence[Key]) -> None:
        """These slots are to hold these keys' blocks: WRITING, claimed by one chain."""
        self.keys[numbers] = np.fromiter(keys, object, len(keys))
        self.is_writing[numbers] = True
        self.num_chains[numbers] = 1

    def forget(self, numbers: Numbers) -> list[Key]:
        """Forget what the slots hold, so that their tickets are void; returns the keys."""
        keys: list[Key] = self.keys[numbers].tolist()
        self.keys[numbers] = None
        self.tickets[numbers] += 1 << _NUMBER_BITS
        self.num_chains[numbers] = 0
        return keys

    # --- chains -----------------------------------------------------------------------
    def mark(self, numbers: Numbers, on: bool) -> None:
        """Mark the slots of one chain, to compare other chains with it, or take the marks off."""
        self._is_marked[numbers] = on

    def unmarked(self, chain: Chain) -> Tickets:
        """Those of the chain's tickets that are still there and not in the marked chain."""
        there = chain.tickets[self.are_there(chain.tickets)]
        return there[~self._is_marked[numbers_of(there)]]

    def is_continued(self, tickets: Tickets) -> bool:
        """Whether the marked chain continues these first blocks of another to their end. A block's
        hash covers all before it, so one common block at the tip, of any KV group, is enough:
        windows may have moved on."""
        tip = None
        for ticket in tickets[::-1]:
            number = ticket & _NUMBER_MASK
            if self.tickets[number] != ticket:
                continue
            block_hash = self.keys[number][:-_GROUP_BYTES]
            tip = tip or block_hash
            if block_hash != tip:
                return False
            if self._is_marked[number]:
                return True
        return tip is None  # then nothing of it is there any more

    def tail(self, chain: Chain, num_wanted: int) -> tuple[int, Numbers, bool]:
        """Take back the chain's claims at its tail, until no chain claims `num_wanted` of those
        slots.

        Returns how many claims were taken back, which slots no chain claims now, and whether the
        next slot is a busy one.
        """
        tickets = chain.tickets[: -num_wanted - 65 : -1]  # some are claimed by others, too
        numbers = numbers_of(tickets)
        there = self.tickets[numbers] == tickets
        alone = there & (self.num_chains[numbers] == 1)
        busy = self.is_writing[numbers] | (self.num_readers[numbers] > 0)
        stuck = (alone & busy).nonzero()[0]
        length = int(stuck[0]) if len(stuck) else len(tickets)
        leaving = alone[:length].nonzero()[0]
        is_stuck = len(stuck) > 0
        if len(leaving) >= num_wanted:
            leaving, is_stuck = leaving[:num_wanted], False
            length = int(leaving[-1]) + 1
        self.num_chains[numbers[:length][there[:length]]] -= 1
        return length, numbers[leaving], is_stuck


class Tally:
    """What would be free if chains let go, one after the other, each as a whole."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._num_gone = np.zeros(len(table.tickets), np.int32)  # chains of each slot that let go

    def add(self, chain: Chain) -> int | None:
        """How many more slots no chain claims once this one lets go, too. None, and it does not let
        go, if one of those is written or read."""
        table = self._table
        numbers = numbers_of(chain.tickets[table.are_there(chain.tickets)])
        free = numbers[self._num_gone[numbers] + 1 == table.num_chains[numbers]]
        if (table.is_writing[free] | (table.num_readers[free] > 0)).any():
            return None
        self._num_gone[numbers] += 1
        return len(free)


BITE = 1024  # slots, or entries of other containers laid aside, per step: 0.2 ms


class Past:
    """What earlier epochs left in a table of slots, given back little by little.

    A new epoch must not wait until the old one is taken apart: for a million blocks that alone
    takes a second. So the old tables are laid aside whole, which costs nothing, and slots are taken
    out of them a bite per step, or when they are needed.

    Tables of keys that are not found any more. Their slots are neither written nor read; they
    are passed to `give_back` when they are to be used again."""

    def __init__(self, give_back: Callable[[Numbers], None]) -> None:
        self.num = 0  # slots
        self._give_back = give_back
        self._tables: deque[dict[Key, int]] = deque()
        self._rubbish: deque[Any] = deque()  # dictionaries and sets that are no longer used

    def add(self, numbers: dict[Key, int], *rubbish: Any) -> None:
        """Lay a table aside, with other containers that are to be taken apart slowly."""
        self.num += len(numbers)
        if numbers:
            self._tables.append(numbers)
        self._rubbish.extend(filter(None, rubbish))

    def yield_slots(self, num_wanted: int) -> None:
        """Give this many slots back, or as many as there are."""
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

    def tidy(self) -> None:
        """Take a bite of what is laid aside; called once a step."""
        if not (self._tables or self._rubbish):
            return
        self.yield_slots(BITE)
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
