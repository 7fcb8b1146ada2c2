"""HostIndex: which blocks are in DRAM, in which slot, and how room is made for more.

A slot is FREE, WRITING (a store is under way) or READY; a READY slot may have readers.
Only READY slots are ever found. A slot that is forgotten while somebody writes or reads it
becomes an orphan: nobody finds it, and it is FREE once the last of them is done.

A program's turn keeps a chain of slots. Chains leave tail first, in the order of eviction.py;
a slot that several chains claim, as those of a common system prompt, leaves with the last.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from continuum_connector.errors import InvariantError
from continuum_connector.scheduler.eviction import EvictionOrder, Rank
from continuum_connector.scheduler.residence import Residence
from continuum_connector.scheduler.slots import Chain, Key, Slot, SlotState

# A claim is one reference, 8 bytes. Where thousands of programs share a long prompt they add up;
# beyond this, half a KiB for a slot of megabytes, the coldest chains leave.
MAX_CLAIMS_PER_SLOT = 64


class HostIndex:
    """Block hash -> slot, the slots' states, and the chains that claim them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # that exist by now, see `grow`
        self.num_ready = 0
        self.num_writing = 0  # orphans under a store included
        self.num_orphans_read = 0
        self.version = 0  # grows whenever a lookup may answer differently
        self.num_evicted = 0  # for room, ever
        self.num_refused = 0  # blocks no room was made for, ever
        self.residence = Residence()
        self.gone: deque[Key] = deque()  # keys forgotten, for any cause, since the caller took them
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Key, Slot] = {}
        self._order = EvictionOrder()
        self._num_claims = 0
        self._num_displaced = 0  # live blocks that left for the store being made

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` exist from now on; they are used after those that did."""
        if num_slots > self.num_slots:
            self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
            self.num_slots = num_slots
            self.residence = Residence()  # of a smaller DRAM; nothing has to leave this one

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def is_ready(self, key: Key) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.state is SlotState.READY

    # --- stores -----------------------------------------------------------------------
    def reserve(
        self,
        keys: Sequence[Key],
        program: str,
        now: float,
        rank: Rank | None = None,
        supersedes: bool = True,
    ) -> list[Slot]:
        """Claim slots for those of `keys`, one chain, not stored yet, evicting if needed.

        Returns a WRITING slot per new key. Stops at the first key for which no room can be
        made, so what is stored of a chain is always a prefix of what was asked: everything
        else is busy, or by `rank` worth more than what `program` has in DRAM. None: the least
        recently used is worth least. With `supersedes` what the program stored of other chains
        leaves before anybody's live chain; without it only what this chain continues does,
        as the program has other turns under way.
        """
        chain = self._begin_chain(keys, program, now, supersedes)
        missing = [key for key in keys if key not in self._slots]
        victims: list[Chain] = []
        claimed = []
        for key, number in zip(missing, self._make_room(chain, now, rank, victims), strict=False):
            slot = Slot(number, key, num_chains=1)
            self._slots[key] = slot
            claimed.append(slot)
        if self._num_displaced:
            self.residence.evicted(self._num_displaced, self.num_slots, now)
            self._num_displaced = 0
        self.num_writing += len(claimed)
        self.num_refused += len(missing) - len(claimed)
        if claimed:
            chain.slots = [self._slots[key] for key in keys if key in self._slots]
            self._num_claims += len(claimed)
        self._drop_empty([*victims, chain])
        self._bound_claims(chain)
        return claimed

    def settle(self, slots: Iterable[Slot], stored: bool) -> None:
        """Their store is over: READY if it succeeded and is still wanted, else FREE."""
        for slot in slots:
            if slot.state is not SlotState.WRITING:
                raise InvariantError(f"slot {slot.number}: expected WRITING, found {slot.state}")
            self.num_writing -= 1
            if stored and not slot.is_forgotten:
                slot.state = SlotState.READY
                self.num_ready += 1
                continue
            if not slot.is_forgotten:
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
            if corrupt and not slot.is_forgotten:
                self._orphan(slot)
            if slot.is_forgotten and not slot.num_readers:
                self.num_orphans_read -= 1
                self._free.append(slot.number)

    # --- order ------------------------------------------------------------------------
    def touch(self, program: str, now: float) -> None:
        """The program was just active: among equals its slots are the last to be evicted."""
        self._order.touch(program, now)

    def demote(self, program: str) -> None:
        """The program is done: what nobody else claims of it is the first to be evicted."""
        self._order.demote(program)

    def clear(self) -> None:
        """Forget everything, as after a weight update; used slots are freed when done."""
        for slot in list(self._slots.values()):
            if slot.state is SlotState.WRITING:
                self._detach(slot)
            else:
                self._orphan(slot)
                if not slot.num_readers:
                    self.num_orphans_read -= 1
                    self._free.append(slot.number)
        self._order = EvictionOrder()
        self._num_claims = 0
        self.residence = Residence()

    # --- chains -----------------------------------------------------------------------
    def _begin_chain(
        self, keys: Sequence[Key], program: str, now: float, supersedes: bool
    ) -> Chain:
        """Claim what is there of `keys` for a new chain, before anything is evicted."""
        present = [self._slots[key] for key in keys if key in self._slots]
        chain = Chain(program, now, present)
        for slot in present:
            slot.num_chains += 1
        self._num_claims += len(present)
        older = [c for c in self._order.current(program) if supersedes or chain.continues(c)]
        if older:
            wanted = set(keys)
            for each in older:
                self._supersede(each, wanted)
        self._order.touch(program, now)
        self._order.add(chain)
        return chain

    def _supersede(self, chain: Chain, wanted: set[Key]) -> None:
        """Leave it only what the newer chain does not want."""
        rest = []
        for slot in chain.slots:
            if slot.key in wanted:
                slot.num_chains -= 1
            else:
                rest.append(slot)
        self._num_claims -= len(chain.slots) - len(rest)
        chain.slots = rest
        (self._order.supersede if rest else self._order.remove)(chain)

    def _make_room(
        self, chain: Chain, now: float, rank: Rank | None, victims: list[Chain]
    ) -> Iterator[int]:
        """Yield slot numbers: the free ones, then those of what is worth no more than `chain`.
        `victims` are then to be dropped if they are empty."""
        while self._free:
            yield self._free.pop()
        own = rank(chain.program) if rank is not None else 0.0
        for worth, victim in self._order.victims(chain, rank):
            if worth > own:
                return
            victims.append(victim)
            while (number := self._free_tail(victim)) is not None:
                self._num_displaced += worth > -math.inf
                yield number

    def _bound_claims(self, chain: Chain) -> None:
        """Let the coldest chains leave, room or not, while there are too many claims."""
        limit, victims = MAX_CLAIMS_PER_SLOT * self.num_slots, []
        if self._num_claims <= limit:
            return
        for _, victim in self._order.victims(chain, None):
            victims.append(victim)
            while self._num_claims > limit and (number := self._free_tail(victim)) is not None:
                self._free.append(number)
            if self._num_claims <= limit:
                break
        self._drop_empty(victims)

    def _drop_empty(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            if not chain.slots:
                self._order.remove(chain)

    def _free_tail(self, chain: Chain) -> int | None:
        """Free the last slot that only `chain` claims, letting go of the claims behind it.
        Return its number, or None if there is none before a busy one."""
        while chain.slots and not chain.is_stuck:
            slot = chain.slots.pop()
            self._num_claims -= 1
            slot.num_chains -= 1
            if not slot.num_chains and not slot.is_forgotten:
                self._detach(slot)
                self.num_ready -= 1
                self.num_evicted += 1
                return slot.number
        return None

    def _orphan(self, slot: Slot) -> None:
        self._detach(slot)
        self.num_ready -= 1
        self.num_orphans_read += 1

    def _detach(self, slot: Slot) -> None:
        """Nobody finds the slot any more; chains that claim it let go when they come to it."""
        del self._slots[slot.key]
        slot.is_forgotten = True
        self.gone.append(slot.key)
        self.version += 1

    def check(self) -> None:
        """Prove that every slot is in exactly one state and claimed; O(slots), for tests."""
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
        claims = Counter(slot for chain in self._order for slot in chain.slots)
        for slot in self._slots.values():
            if not slot.num_chains == claims[slot] > 0:
                raise InvariantError(
                    f"slot {slot.number}: {slot.num_chains} claims counted, {claims[slot]} found"
                )
        if any(count > 1 for count in Counter(self._order).values()):
            raise InvariantError("a chain is in two queues")
        if not all(chain.slots for chain in self._order):
            raise InvariantError("a chain without slots is still to be evicted")
        if self._num_claims != claims.total():
            raise InvariantError(f"{self._num_claims} claims counted, {claims.total()} found")
