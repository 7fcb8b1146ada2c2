"""HostIndex: which blocks are in DRAM, in which slot, and whose go first when it is full.

A slot is FREE, WRITING (a store is under way) or READY; a READY slot may have readers.
Only READY slots are ever found. A slot that is dropped while somebody writes or reads it
becomes an orphan: nobody finds it, and it is FREE once the last of them is done.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from continuum_connector.errors import InvariantError

Key = bytes  # vLLM's BlockHashWithGroupId: block hash, then the KV group in 4 bytes

_NO_KEYS: OrderedDict[Key, None] = OrderedDict()


class SlotState(enum.Enum):
    WRITING = "writing"
    READY = "ready"


@dataclass(eq=False)
class Slot:
    """One block's place in host memory; FREE slots have no object."""

    number: int
    key: Key
    program: str
    state: SlotState = SlotState.WRITING
    num_readers: int = 0
    is_orphan: bool = False


class HostIndex:
    """Block hash -> slot, with least-recently-used program first, tail of the chain first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # that exist by now, see `grow`
        self.num_ready = 0
        self.num_writing = 0  # orphans under a store included
        self.num_orphans_read = 0
        self.version = 0  # grows whenever a lookup may answer differently
        self.num_evicted = 0  # for room, ever
        self.gone: deque[Key] = deque()  # keys forgotten, for any cause, since the caller took them
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Key, Slot] = {}
        # Programs in order of last use; each one's keys in chain order, head first.
        self._programs: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on; they are used after those that did."""
        if num_slots > self.num_slots:
            self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
            self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def is_ready(self, key: Key) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.state is SlotState.READY

    # --- stores -----------------------------------------------------------------------
    def reserve(self, keys: Sequence[Key], program: str) -> list[Slot]:
        """Claim slots for those of `keys`, one chain, not stored yet, evicting if needed.

        Returns a WRITING slot per key claimed. Stops at the first key for which no room
        can be made, so what is stored of a chain is always a prefix of what was asked.
        Keys that are there already now belong to `program`: the latest user keeps them.
        What the program stored of another chain goes before this one from now on.
        """
        self.touch(program)
        self._lead(program, keys)
        chain, claimed = set(keys), []
        for key in keys:
            if key in self._slots:
                continue
            if not self._free and not self._evict_one(program, chain):
                break
            slot = Slot(self._free.pop(), key, program)
            self._slots[key] = slot
            self.num_writing += 1
            claimed.append(slot)
        if claimed:
            self._lead(program, keys)
        return claimed

    def settle(self, slots: Iterable[Slot], stored: bool) -> None:
        """Their store is over: READY if it succeeded and is still wanted, else FREE."""
        for slot in slots:
            if slot.state is not SlotState.WRITING:
                raise InvariantError(f"slot {slot.number}: expected WRITING, found {slot.state}")
            self.num_writing -= 1
            if stored and not slot.is_orphan:
                slot.state = SlotState.READY
                self.num_ready += 1
                continue
            if not slot.is_orphan:
                self._detach(slot)
            self._free.append(slot.number)
        self.version += 1

    # --- loads ------------------------------------------------------------------------
    def acquire(self, keys: Iterable[Key]) -> list[Slot]:
        """Start reading; every key must be READY. The slots cannot be reused meanwhile."""
        slots = []
        for key in keys:
            slot = self._slots[key]
            if slot.state is not SlotState.READY:
                raise InvariantError(f"slot {slot.number}: expected READY, found {slot.state}")
            slot.num_readers += 1
            slots.append(slot)
        return slots

    def release(self, slots: Iterable[Slot], corrupt: bool = False) -> None:
        """Stop reading. `corrupt`: what was read cannot be trusted, so forget the slots."""
        for slot in slots:
            slot.num_readers -= 1
            if corrupt and not slot.is_orphan:
                self._orphan(slot)
            if slot.is_orphan and not slot.num_readers:
                self.num_orphans_read -= 1
                self._free.append(slot.number)

    # --- order ------------------------------------------------------------------------
    def touch(self, program: str) -> None:
        """The program was just active: its slots are the last to be evicted."""
        if program in self._programs:
            self._programs.move_to_end(program)

    def demote(self, program: str) -> None:
        """The program is done: its slots are the first to be evicted."""
        if program in self._programs:
            self._programs.move_to_end(program, last=False)

    def clear(self) -> None:
        """Forget everything, as after a weight update; used slots are freed when done."""
        for slot in list(self._slots.values()):
            if slot.state is SlotState.WRITING:
                self._detach(slot)
                slot.is_orphan = True
            else:
                self._orphan(slot)
                if not slot.num_readers:
                    self.num_orphans_read -= 1
                    self._free.append(slot.number)

    def _lead(self, program: str, chain: Sequence[Key]) -> None:
        """Make what is there of `chain` the program's, ahead of its other keys."""
        present = [key for key in chain if key in self._slots]
        for key in present:
            slot = self._slots[key]
            if slot.program != program:
                self._remove_key(slot)
                slot.program = program
        if present:
            keys = self._programs.setdefault(program, OrderedDict())
            for key in reversed(present):
                keys[key] = None
                keys.move_to_end(key, last=False)

    def _evict_one(self, program: str, chain: Container[Key]) -> bool:
        """Free a slot for `program`: the tail of the least recently used other program, or,
        when the others have nothing to give, of what the program keeps beside `chain`."""
        others = (keys for other, keys in self._programs.items() if other != program)
        own = itertools.takewhile(
            lambda key: key not in chain, reversed(self._programs.get(program, _NO_KEYS))
        )
        for key in itertools.chain(itertools.chain.from_iterable(map(reversed, others)), own):
            slot = self._slots[key]
            if slot.state is SlotState.READY and not slot.num_readers:
                self._detach(slot)
                self.num_ready -= 1
                self.num_evicted += 1
                self._free.append(slot.number)
                return True
        return False

    def _orphan(self, slot: Slot) -> None:
        self._detach(slot)
        self.num_ready -= 1
        self.num_orphans_read += 1
        slot.is_orphan = True

    def _detach(self, slot: Slot) -> None:
        """Nobody finds the slot any more."""
        del self._slots[slot.key]
        self._remove_key(slot)
        self.gone.append(slot.key)
        self.version += 1

    def _remove_key(self, slot: Slot) -> None:
        keys = self._programs[slot.program]
        del keys[slot.key]
        if not keys:
            del self._programs[slot.program]

    def check(self) -> None:
        """Prove that every slot is in exactly one state; O(slots), for tests."""
        states = [slot.state for slot in self._slots.values()]
        if self.num_ready != states.count(SlotState.READY):
            raise InvariantError(f"{self.num_ready} slots counted as READY, {states} found")
        total = self.num_free + self.num_ready + self.num_writing + self.num_orphans_read
        if total != self.num_slots:
            raise InvariantError(
                f"{self.num_slots} slots, but free {self.num_free} + ready {self.num_ready} + "
                f"writing {self.num_writing} + orphans being read {self.num_orphans_read} = {total}"
            )
        numbers = [slot.number for slot in self._slots.values()] + self._free
        if len(set(numbers)) != len(numbers):
            raise InvariantError("a slot is both free and used, or used twice")
