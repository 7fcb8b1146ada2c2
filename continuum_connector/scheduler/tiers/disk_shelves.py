"""Shelves: in which order what is on disk leaves for room.

What finished programs left goes first, then what newer turns of their programs did not continue,
then what a restart found and no turn has asked for, then the least recently used program's slots.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from continuum_connector.scheduler.tiers.slots import Numbers

_NOBODY = 0
_NOTHING: Numbers = np.empty(0, np.int64)


class Shelf:
    """Disk slots that one program took; some of them may stand on another shelf by now."""

    __slots__ = ("number", "program", "slots")

    def __init__(self, number: int, program: str) -> None:
        self.number = number
        self.program = program
        self.slots = _NOTHING


class Shelves:
    """Every disk slot in use stands on the shelf of the program that asked for it last."""

    def __init__(self) -> None:
        self._shelf_of = np.empty(0, np.int64)  # of each slot, or _NOBODY
        self._numbers = itertools.count(_NOBODY + 1)
        self._begin()

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = np.zeros(num_slots - len(self._shelf_of), np.int64)
        self._shelf_of = np.concatenate([self._shelf_of, more])

    def clear(self) -> Sequence[Any]:
        """Empty all shelves: the number that a slot has belongs to no shelf any more. Returns the
        containers that the shelves were in, to be taken apart."""
        old = self._done, self._superseded, self._found, self._live, self._current
        self._begin()
        return old

    def _begin(self) -> None:
        self._done: OrderedDict[int, Shelf] = OrderedDict()
        self._superseded: OrderedDict[int, Shelf] = OrderedDict()
        self._found: OrderedDict[int, Shelf] = OrderedDict()
        self._live: OrderedDict[int, Shelf] = OrderedDict()  # least recently used first
        self._current: dict[str, Shelf] = {}  # program -> its shelf, live or done
        self._num_entries = 0  # slots listed on all shelves, with those that stand elsewhere by now

    # --- which slot stands where --------------------------------------------------------
    def place(self, program: str, numbers: Numbers) -> None:
        """Add these slots to what the program has, which is used now."""
        shelf = self._current.get(program) or self._new(program)
        self._stand(shelf, numbers)
        self._current[program] = shelf
        self._done.pop(shelf.number, None)
        self._live[shelf.number] = shelf
        self._live.move_to_end(shelf.number)

    def use(self, program: str, numbers: Numbers, supersedes: bool) -> None:
        """A turn of the program wants these slots: they are the last to leave. With `supersedes` it
        wants nothing else of what the program has."""
        older = self._current.get(program)
        if supersedes and older is not None:
            del self._current[program]
            self._live.pop(older.number, None)
            self._done.pop(older.number, None)
            self._superseded[older.number] = older
        if len(numbers):
            self.place(program, numbers)
        if supersedes and older is not None:
            self._compact(older)

    def demote(self, program: str) -> None:
        """The program is done: make what it has the first to leave."""
        shelf = self._current.get(program)
        if shelf is not None:
            self._live.pop(shelf.number, None)
            self._done[shelf.number] = shelf

    def found(self, numbers: Numbers) -> None:
        """These slots were there before any program came."""
        shelf = self._new("")
        self._stand(shelf, numbers)
        self._found[shelf.number] = shelf

    def take_off(self, numbers: Numbers) -> None:
        """These slots hold nothing any more."""
        self._shelf_of[numbers] = _NOBODY

    # --- which slots leave -------------------------------------------------------------
    def to_leave(self) -> Iterator[Shelf]:
        """All shelves, the first to leave first; those that were emptied are dropped on the way."""
        for shelf in self._all():
            yield shelf
            self._compact(shelf)

    def standing(self, shelf: Shelf) -> Numbers:
        """The slots that still stand there."""
        there: Numbers = shelf.slots[self._shelf_of[shelf.slots] == shelf.number]
        return there

    # --- parts ------------------------------------------------------------------------
    def _new(self, program: str) -> Shelf:
        return Shelf(next(self._numbers), program)

    def _stand(self, shelf: Shelf, numbers: Numbers) -> None:
        """Put these slots on the shelf, beside what already stands there."""
        self._shelf_of[numbers] = _NOBODY
        self._compact(shelf)
        shelf.slots = np.concatenate([shelf.slots, numbers])
        self._shelf_of[numbers] = shelf.number
        self._num_entries += len(numbers)
        if self._num_entries > 2 * len(self._shelf_of):  # programs share what one of them took last
            for each in self._all():
                self._compact(each)

    def _compact(self, shelf: Shelf) -> None:
        """Drop slots that stand elsewhere by now; a shelf with no slots left is removed."""
        standing = self.standing(shelf)
        self._num_entries += len(standing) - len(shelf.slots)
        shelf.slots = standing
        if not len(standing):
            self._remove(shelf)

    def _all(self) -> Iterator[Shelf]:
        for queue in (self._done, self._superseded, self._found, self._live):
            yield from list(queue.values())

    def _remove(self, shelf: Shelf) -> None:
        for queue in (self._done, self._superseded, self._found, self._live):
            queue.pop(shelf.number, None)
        if self._current.get(shelf.program) is shelf:
            del self._current[shelf.program]
