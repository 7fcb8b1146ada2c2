"""DiskIndex: what is on disk, in which disk slot, and which slots leave for room.

A disk slot holds some consecutive blocks of one chain and is named by the last of them, whose hash
covers all before it. It is FREE, WRITING, READY, or BAD: the disk failed there, so it is never used
again. A slot that is forgotten while it is written or read is an orphan until that is over.

Shelves: in which order what is on disk leaves for room. What only finished programs used goes
first, then what a restart found and no turn has asked for, then what no turn has used for longest;
of each shelf, the slots deepest in their chains. A slot that several programs use is left once all
of them have finished: the prefix that they share is needed by the last of them, and what that one
has behind it would be useless without.

Marks: what the disk needs to know about the blocks in DRAM, as columns beside the slots.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from continuum_connector.errors import InvariantError
from continuum_connector.messages import OnDisk
from continuum_connector.scheduler.kv_groups import Flags, Key, Numbers
from continuum_connector.scheduler.tiers.slots import FreeSlots, Past, Tickets, numbers_of


class _State(enum.IntEnum):
    FREE = 0
    WRITING = 1
    READY = 2
    ORPHAN = 3
    BAD = 4


class DiskIndex:
    """Key -> disk slot, the slots' states, and the shelves that they stand on. It is open from the
    first `grow` until `close`. `tells`: whether somebody asks which keys have gone."""

    def __init__(self, tells: bool = False) -> None:
        self.is_open = False
        self.num_slots = 0
        self.num_ready = 0
        self.num_writing = 0  # orphans included
        self.num_bad = 0
        self.num_evicted = 0  # ever
        # Keys forgotten that were READY, if somebody asks.
        self._gone: deque[Key] | None = deque() if tells else None
        self.displaced: list[Key] = []  # those that left for room in the last `reserve`
        self._numbers: dict[Key, int] = {}  # of slots that are WRITING or READY
        self._free = FreeSlots()
        self._keys: npt.NDArray[np.object_] = np.empty(0, object)
        self._states = np.empty(0, np.int8)
        self._num_readers = np.empty(0, np.int32)
        self._depths = np.empty(0, np.int32)
        self.shelves = Shelves()
        self.past = Past(self._regain)  # of earlier epochs

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        self.is_open = True
        more = num_slots - self.num_slots
        if more <= 0:
            return
        self._free.grow(self.num_slots, num_slots)
        self._keys = np.concatenate([self._keys, np.empty(more, object)])
        for name in ("_states", "_num_readers", "_depths"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self.shelves.grow(num_slots)
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots that hold nothing, or nothing of this epoch."""
        return self._free.num + self.past.num

    def __contains__(self, key: Key) -> bool:
        return key in self._numbers

    def find(self, keys: Sequence[Key]) -> Numbers:
        """Each key's slot if that is READY, else -1."""
        if not self._numbers:
            return np.full(len(keys), -1)
        found = map(self._numbers.get, keys, itertools.repeat(-1))
        numbers = np.fromiter(found, np.int64, len(keys))
        numbers[self._states[numbers] != _State.READY] = -1
        return numbers

    def outlasts(self, program: str, num_slots: int) -> bool:
        """Whether what the program used last is still there when so many slots more are taken."""
        return max(self.num_free, self.shelves.num_before(program)) >= num_slots

    def demote(self, program: str, keys: Sequence[Key | None]) -> None:
        """The program is done with these: what no other uses leaves first."""
        found = (self._numbers.get(key) for key in keys if key is not None)
        numbers = np.array([number for number in found if number is not None], np.int64)
        self.shelves.demote(program, numbers)

    # --- writes -----------------------------------------------------------------------
    def reserve(self, program: str, keys: Sequence[Key], depths: Sequence[int]) -> Numbers:
        """Return a WRITING slot for each of those keys, none of which is there yet; for the first
        of them only if all other slots are busy. Makes room in the order of Shelves."""
        self.displaced = []
        if self._free.num < len(keys):
            self.past.yield_slots(len(keys) - self._free.num)
        if self._free.num < len(keys):
            self._make_room(len(keys) - self._free.num)
        numbers = self._free.take(len(keys))
        keys = keys[: len(numbers)]
        self._claim(numbers, keys, depths[: len(numbers)], _State.WRITING)
        self.num_writing += len(numbers)
        self.shelves.place(program, numbers)
        return numbers

    def settle(self, numbers: Numbers, written: bool, is_bad: bool = False) -> None:
        """Their write is over: READY if it succeeded and is still wanted, else FREE, or BAD."""
        if not np.isin(self._states[numbers], (_State.WRITING, _State.ORPHAN)).all():
            raise InvariantError(f"disk slots {numbers}: expected WRITING, found another state")
        self.num_writing -= len(numbers)
        is_wanted = self._states[numbers] == _State.WRITING
        if written:
            self._states[numbers[is_wanted]] = _State.READY
            self.num_ready += int(np.count_nonzero(is_wanted))
            self._let_go(numbers[~is_wanted])
            return
        self._forget_keys(numbers[is_wanted])
        self._let_go(numbers, is_bad)

    # --- reads ------------------------------------------------------------------------
    def acquire(self, numbers: Numbers) -> None:
        """Start reading; all must be READY. No slot is given to another key meanwhile."""
        if (self._states[numbers] != _State.READY).any():
            raise InvariantError(f"disk slots {numbers}: expected READY, found another state")
        self._num_readers[numbers] += 1

    def release(self, numbers: Numbers, forget: bool = False, is_bad: bool = False) -> None:
        """Stop reading; `forget` slots whose content proved wrong."""
        self._num_readers[numbers] -= 1
        if forget:
            self.forget(numbers, is_bad)
        orphans = numbers[self._states[numbers] == _State.ORPHAN]
        self._let_go(orphans[self._num_readers[orphans] == 0], is_bad)

    def forget(self, numbers: Numbers, is_bad: bool = False) -> None:
        """Forget those that are READY; those that are not being read are FREE at once."""
        numbers = numbers[self._states[numbers] == _State.READY]
        self.num_ready -= len(numbers)
        if self._gone is not None:
            self._gone.extend(self._keys[numbers].tolist())
        self._forget_keys(numbers)
        is_idle = self._num_readers[numbers] == 0
        self._states[numbers[~is_idle]] = _State.ORPHAN
        self._let_go(numbers[is_idle], is_bad)

    # --- all of them ------------------------------------------------------------------
    def found(self, entries: Sequence[OnDisk]) -> int:
        """Take in what a restart found, if its slot is still FREE and its key in no other slot;
        returns how many. It is unknown who used them, so they leave before all that live programs
        used."""
        last: dict[Key, OnDisk] = {}  # a key may still lie in slots that it left for room
        for each in sorted(entries, key=lambda each: each.sequence):
            is_free = each.slot < self.num_slots and self._states[each.slot] == _State.FREE
            if is_free and each.key not in self._numbers:
                last[each.key] = each
        entries = list(last.values())
        numbers = np.array([each.slot for each in entries], np.int64)
        if len(numbers):
            self._free.remove(numbers)
            depths = [each.depth for each in entries]
            self._claim(numbers, [each.key for each in entries], depths, _State.READY)
            self.num_ready += len(numbers)
            self.shelves.found(numbers)
        return len(numbers)

    def take_gone(self) -> list[Key]:
        """The keys that are found no more since the last call."""
        gone = list(self._gone or ())
        if gone:
            self._gone = deque()
        return gone

    def close(self) -> list[Key]:
        """Nothing is kept any more. Returns all keys that are there, or have gone untold."""
        self.is_open = False
        gone, self._gone = [*(self._gone or ()), *self._numbers], None
        return gone

    def clear(self) -> None:
        """Begin a new epoch: nothing from before is found, at once. Slots being written or read are
        orphans until that is over; the others become FREE little by little."""
        states = self._states
        writing = (states == _State.WRITING).nonzero()[0]
        self._forget_keys(writing)
        states[writing] = _State.ORPHAN
        self.forget((self._num_readers > 0).nonzero()[0])
        self.num_ready = 0
        self.past.add(self._numbers, *self.shelves.clear())
        self._numbers = {}

    # --- parts ------------------------------------------------------------------------
    def _claim(
        self, numbers: Numbers, keys: Sequence[Key], depths: Sequence[int], state: _State
    ) -> None:
        self._numbers.update(zip(keys, numbers.tolist(), strict=True))
        self._keys[numbers] = np.fromiter(keys, object, len(keys))
        self._depths[numbers] = depths
        self._states[numbers] = state

    def _forget_keys(self, numbers: Numbers) -> None:
        for key in self._keys[numbers].tolist():
            del self._numbers[key]
        self._keys[numbers] = None
        self.shelves.take_off(numbers)

    def _let_go(self, numbers: Numbers, is_bad: bool = False) -> None:
        self._states[numbers] = _State.BAD if is_bad else _State.FREE
        if is_bad:
            self.num_bad += len(numbers)
        else:
            self._free.put(numbers)

    def _regain(self, numbers: Numbers) -> None:
        """Take back these slots of earlier epochs: they are FREE now."""
        if self._gone is not None:
            keys = self._keys[numbers].tolist()
            self._gone.extend(key for key in keys if key not in self._numbers)
        self._keys[numbers] = None
        self.shelves.take_off(numbers)
        self._let_go(numbers)

    def _make_room(self, num_wanted: int) -> None:
        for shelf in self.shelves.to_leave():
            slots = self.shelves.standing(shelf)
            is_idle = (self._states[slots] == _State.READY) & (self._num_readers[slots] == 0)
            idle = slots[is_idle]
            leaving = idle[np.argsort(self._depths[idle], kind="stable")][-num_wanted:]
            self.num_evicted += len(leaving)
            self.displaced += self._keys[leaving].tolist()
            self.forget(leaving[::-1])
            num_wanted -= len(leaving)
            if num_wanted <= 0:
                return


class Found:
    """Combines what a restart found on the disks of all ranks. It arrives in pieces, each rank at
    its own pace. A slot counts once every rank has found the same block in it, because a load needs
    the block on all.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._is_open = True
        self._seen: dict[tuple[int, bytes], int] = {}  # (slot, key) -> how many ranks have it

    def on_all(self, found: Mapping[int, Sequence[OnDisk]]) -> list[OnDisk]:
        """Return the entries that all ranks have found by now, each once."""
        if not self._is_open:
            return []
        entries = [each for entries in found.values() for each in entries]
        return [each for each in entries if self._world_size == 1 or self._completes(each)]

    def close(self) -> None:
        """The disks were reset: what they still report is from before that."""
        self._is_open = False
        self._seen.clear()

    def _completes(self, entry: OnDisk) -> bool:
        place = entry.slot, entry.key
        number = self._seen.pop(place, 0) + 1
        if number < self._world_size:
            self._seen[place] = number
        return number == self._world_size


_NOBODY = 0
_NOTHING: Numbers = np.empty(0, np.int64)
_MAX_CHAINS = 8  # of a program; beyond, the one used longest ago claims nothing
_MAX_CLAIMS = 8  # on average, of chains on a slot; beyond, the oldest claims are forgotten


@dataclass(eq=False, slots=True)
class Shelf:
    """Disk slots that one turn used; some of them may stand on another shelf by now."""

    number: int
    program: str
    slots: Numbers = field(default_factory=lambda: _NOTHING)
    num_taken: int = 0  # slots that live programs had ever taken when this was last used


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


class Shelves:
    """Every disk slot in use stands on the shelf of the turn that used it last."""

    def __init__(self) -> None:
        self._shelf_of = np.empty(0, np.int64)  # of each slot, or _NOBODY
        self.claims = Claims()
        self._numbers = itertools.count(_NOBODY + 1)
        self._num_taken = 0  # slots, ever
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
    def num_before(self, program: str) -> int:
        """How many slots are taken, at least, before what the program used last leaves for room. A
        slot that was taken again since counts twice."""
        shelf = self._last.get(program)
        if shelf is None:
            return 0
        return len(self._shelf_of) - (self._num_taken - shelf.num_taken) - len(shelf.slots)

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
        self._num_taken += len(numbers)
        shelf.num_taken = self._num_taken
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


_MOST_USES = 2**30
NEVER = -1
MAX_LOST = 1024  # programs of which it is remembered why some of their blocks are on no disk


class Marks:
    """For each slot: its block's place in the chain, how many turns used it, if it is on disk."""

    def __init__(
        self, keys_at: Callable[[Numbers], list[Key]], slot_blocks: int = 1, block_tokens: int = 1
    ) -> None:
        """`keys_at`: what slots hold; `slot_blocks`: blocks of a disk slot."""
        self._keys_at = keys_at
        self._slot_blocks = slot_blocks
        self._block_tokens = block_tokens
        self.places = np.zeros(0, np.int32)
        self.uses = np.zeros(0, np.int32)  # by turns that stored it, or stored on top of it
        self.is_saved = np.zeros(0, np.bool_)
        self.is_refused = np.zeros(0, np.bool_)  # its write was refused and counted
        # The index's version when another write displaced it from the disk, or NEVER.
        self.displaced_at = np.full(0, NEVER, np.int64)
        # Names of the disk slots that were written from each slot, if a disk slot takes several
        # blocks.
        self._names: npt.NDArray[np.object_] = np.zeros(0, object)
        self._lost: dict[str, tuple[Key, str]] = {}  # by program, the latest last
        self.num_unsaved = 0  # blocks that left for room before they could be written, ever

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on."""
        more = num_slots - len(self.places)
        for name in ("places", "uses", "is_saved", "is_refused", "_names"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self.displaced_at = np.concatenate([self.displaced_at, np.full(more, NEVER)])

    def came(
        self, numbers: Numbers, ends: Sequence[int], which: Numbers, uses: Iterable[int] | int
    ) -> None:
        """These slots are to hold blocks of a chain (Below)."""
        self.places[numbers] = np.asarray(ends, np.int32)[which] // self._block_tokens - 1
        known = uses if isinstance(uses, int) else np.fromiter(uses, np.int32, len(numbers))
        self.uses[numbers] = known + 1
        self.is_saved[numbers] = False
        self.is_refused[numbers] = False
        self.displaced_at[numbers] = NEVER
        self._names[numbers] = 0

    def used(self, numbers: Numbers) -> None:
        """Another turn has stored on top of these slots."""
        self.uses[numbers] = np.minimum(self.uses[numbers] + 1, _MOST_USES)

    def save(self, tickets: Tickets) -> None:
        """These slots' blocks are on disk."""
        self.is_saved[numbers_of(tickets)] = True

    def name(self, tickets: Tickets, names: Sequence[Key]) -> None:
        """Disk slots of those names were written from these slots, each from equally many."""
        parts = numbers_of(tickets).reshape(len(names), -1).tolist()
        for name, part in zip(names, parts, strict=True):
            for number in part:
                others = self._names[number] or ()
                if name not in others:
                    self._names[number] = (*others, name)

    def names_of(self, tickets: Tickets) -> set[Key]:
        """The names of all disk slots that were written from these slots."""
        return set(itertools.chain.from_iterable(filter(None, self._names[numbers_of(tickets)])))

    def are_saved(self, numbers: Numbers) -> Flags:
        """Which of a chain's blocks are on disk. Blocks of its tail after the last whole disk slot
        count as saved, because no disk takes them."""
        are_saved = self.is_saved[numbers]
        if self._slot_blocks > 1 and len(numbers):
            places = self.places[numbers]
            are_saved |= places >= (places[-1] + 1) // self._slot_blocks * self._slot_blocks
        return are_saved

    def left(self, numbers: Numbers, program: str) -> int:
        """These blocks of a program leave for room and may still be wanted. Returns how many no
        disk has."""
        lost = numbers[~self.is_saved[numbers]]
        if not len(lost):
            return 0
        self.num_unsaved += int(np.count_nonzero(~self.is_refused[lost]))
        first = int(lost[self.places[lost].argmin()])
        self._lost.pop(program, None)
        why = "budget" if self.is_refused[first] else "unsaved"
        self._lost[program] = self._keys_at(np.array([first]))[0], why
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return len(lost)

    def lost(self, program: str) -> tuple[Key, str]:
        """Of the program's blocks that left last before a disk had them, the first in its chain,
        and why: they were "unsaved", or the "budget" did not allow it. Two empty ones if none is
        remembered."""
        return self._lost.get(program, (b"", ""))

    def clear(self) -> None:
        """What is nowhere after a reset was not lost for room."""
        self._lost.clear()
