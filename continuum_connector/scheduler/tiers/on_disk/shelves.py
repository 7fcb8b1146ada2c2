"""Shelves: in which order what is on disk leaves for room.

What only finished programs used goes first, then what a restart found and no turn has asked for,
then what no turn has used for longest. A slot that several programs use is left once all of them
have finished: the prefix that they share is needed by the last of them, and what that one has
behind it would be useless without.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from continuum_connector.errors import InvariantError
from continuum_connector.scheduler.tiers.slots import Numbers

_NOBODY = 0
_NOTHING: Numbers = np.empty(0, np.int64)
_MAX_CHAINS = 8  # of a program; beyond, the one used longest ago claims nothing
_MAX_CLAIMS = 8  # on average, of chains on a slot; beyond, the oldest claims are forgotten


class Shelf:
    """Disk slots that one turn used; some of them may stand on another shelf by now."""

    __slots__ = ("number", "program", "slots")

    def __init__(self, number: int, program: str) -> None:
        self.number = number
        self.program = program
        self.slots = _NOTHING


class Claims:
    """Which slots the chains of programs use that have not finished. `num_of`: how many chains
    claim a slot. A claim is on what the slot held then: once that has left, it is nobody's."""

    def __init__(self) -> None:
        self.num_of = np.empty(0, np.int64)
        self._content = np.empty(0, np.int64)  # of each slot: it changes when that leaves
        # By program, least recently used first: of each chain its slots, and their content.
        self.of: OrderedDict[str, list[tuple[Numbers, Numbers]]] = OrderedDict()
        self._num_entries = 0

    def grow(self, num_slots: int) -> None:
        more = np.zeros(num_slots - len(self.num_of), np.int64)
        self.num_of = np.concatenate([self.num_of, more])
        self._content = np.concatenate([self._content, more])

    def clear(self) -> Any:
        """Forget all of them; returns their container, to be taken apart."""
        self.num_of[:] = 0
        old, self.of, self._num_entries = self.of, OrderedDict(), 0
        return old

    def use(self, program: str, numbers: Numbers) -> None:
        """A chain of the program uses these slots; what it continues claims nothing any more."""
        self.end(program, numbers)
        if len(self.of.get(program, ())) >= _MAX_CHAINS:
            self._end(program, 0)
        self._begin(program, numbers)

    def add(self, program: str, numbers: Numbers) -> None:
        """The chain of the program that was used last uses these slots, too."""
        if self.of.get(program):
            numbers = np.union1d(self._end(program, -1), numbers)
        self._begin(program, numbers)

    def end(self, program: str, numbers: Numbers) -> None:
        """What has no slots but these claims nothing any more."""
        chains = self.of.get(program, ())
        for place in reversed(range(len(chains))):
            slots, content = chains[place]
            if np.isin(slots[self._content[slots] == content], numbers).all():
                self._end(program, place)

    def left(self, numbers: Numbers) -> None:
        """What these slots held has left."""
        self._content[numbers] += 1
        self.num_of[numbers] = 0

    def _begin(self, program: str, numbers: Numbers) -> None:
        self.num_of[numbers] += 1
        self.of.setdefault(program, []).append((numbers, self._content[numbers]))
        self.of.move_to_end(program)
        self._num_entries += len(numbers)
        while self._num_entries > _MAX_CLAIMS * len(self.num_of):
            self._end(next(iter(self.of)), 0)

    def _end(self, program: str, place: int) -> Numbers:
        """Returns what that chain claimed and is there still."""
        chains = self.of[program]
        slots, content = chains.pop(place)
        if not chains:
            del self.of[program]
        self._num_entries -= len(slots)
        there: Numbers = slots[self._content[slots] == content]
        self.num_of[there] -= 1
        return there

    def check(self) -> None:
        """Prove that the counts are those of the claims; O(claims), for tests."""
        claims = [claim for chains in self.of.values() for claim in chains]
        held = [slots[self._content[slots] == content] for slots, content in claims]
        counts = np.bincount(np.concatenate([_NOTHING, *held]), minlength=len(self.num_of))
        if (counts != self.num_of).any():
            raise InvariantError(f"disk slots are claimed {counts}, counted {self.num_of}")
        if self._num_entries != sum(len(slots) for slots, _ in claims):
            raise InvariantError(f"{self._num_entries} claims on disk slots are counted wrongly")


class Shelves:
    """Every disk slot in use stands on the shelf of the turn that used it last."""

    def __init__(self) -> None:
        self._shelf_of = np.empty(0, np.int64)  # of each slot, or _NOBODY
        self.claims = Claims()
        self._numbers = itertools.count(_NOBODY + 1)
        self._begin()

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = np.zeros(num_slots - len(self._shelf_of), np.int64)
        self._shelf_of = np.concatenate([self._shelf_of, more])
        self.claims.grow(num_slots)

    def clear(self) -> Sequence[Any]:
        """Empty all shelves: the number that a slot has belongs to no shelf any more. Returns the
        containers that the shelves were in, to be taken apart."""
        old = self._done, self._found, self._live, self._last, self.claims.clear()
        self._begin()
        return old

    def _begin(self) -> None:
        self._done: OrderedDict[int, Shelf] = OrderedDict()
        self._found: OrderedDict[int, Shelf] = OrderedDict()
        self._live: OrderedDict[int, Shelf] = OrderedDict()  # least recently used first
        self._last: dict[str, Shelf] = {}  # program -> the last shelf it took, one of those in use
        self._num_entries = 0  # slots listed on all shelves, with those that stand elsewhere by now

    # --- which slot stands where --------------------------------------------------------
    def place(self, program: str, numbers: Numbers) -> None:
        """Add these slots to what the program's last turn used; that counts as used now."""
        if len(numbers):
            self.claims.add(program, numbers)
            self._take(self._last.get(program) or self._new(program), numbers)

    def use(self, program: str, numbers: Numbers) -> None:
        """A turn of the program wants these slots: they are the last to leave. What else the
        program has stays where it is, as another of its chains may want that."""
        if len(numbers):
            older = self._last.get(program)
            self.claims.use(program, numbers)
            self._take(self._new(program), numbers)
            if older is not None:
                self._compact(older)

    def demote(self, program: str, numbers: Numbers) -> None:
        """The program wants these slots no more: make those that nobody else uses the first to
        leave."""
        self.claims.end(program, numbers)
        numbers = numbers[self.claims.num_of[numbers] == 0]
        if len(numbers):
            shelf = self._new("")
            self._done[shelf.number] = shelf
            self._stand(shelf, numbers)

    def demote_all(self, program: str) -> None:
        """The program wants none of its slots any more."""
        for slots, _ in tuple(self.claims.of.get(program, ())):
            self.demote(program, slots)

    def found(self, numbers: Numbers) -> None:
        """These slots were there before any program came."""
        shelf = self._new("")
        self._found[shelf.number] = shelf
        self._stand(shelf, numbers)

    def take_off(self, numbers: Numbers) -> None:
        """These slots hold nothing any more."""
        self._shelf_of[numbers] = _NOBODY
        self.claims.left(numbers)

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

    def _take(self, shelf: Shelf, numbers: Numbers) -> None:
        """The shelf's program uses these slots now."""
        self._last[shelf.program] = shelf
        self._live[shelf.number] = shelf
        self._live.move_to_end(shelf.number)
        self._stand(shelf, numbers)

    def _stand(self, shelf: Shelf, numbers: Numbers) -> None:
        """Put these slots on the shelf, beside what already stands there."""
        self._shelf_of[numbers] = _NOBODY
        shelf.slots = np.concatenate([shelf.slots, numbers])
        self._num_entries += len(numbers)
        there = self._shelf_of[shelf.slots] == shelf.number
        there[len(shelf.slots) - len(numbers) :] = True
        self._num_entries -= int(np.count_nonzero(~there))
        shelf.slots = shelf.slots[there]
        self._shelf_of[numbers] = shelf.number
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
        for queue in (self._done, self._found, self._live):
            yield from list(queue.values())

    def _remove(self, shelf: Shelf) -> None:
        for queue in (self._done, self._found, self._live):
            queue.pop(shelf.number, None)
        if self._last.get(shelf.program) is shelf:
            del self._last[shelf.program]
