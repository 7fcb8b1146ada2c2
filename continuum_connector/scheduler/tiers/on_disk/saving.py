"""Saving: which blocks of DRAM are written to the disk next.

What would leave DRAM next is written before it has to, so that eviction stays instant: a store that
needs room never waits for a disk, and what is not written by then is dropped. With budget to spare
the rest is written too, for a restart to find. Nothing is written twice, and nothing of programs
that are done. What another write displaced is written again where there is room, or when it is
about to leave DRAM and DRAM has changed: where the disk is small each write would displace what the
next one writes, and an idle server would write for ever.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.eviction import Rank
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.on_disk.index import DiskIndex
from continuum_connector.scheduler.tiers.on_disk.marks import NEVER, Marks
from continuum_connector.scheduler.tiers.on_disk.writing import SPARE_FILL, Budget
from continuum_connector.scheduler.tiers.slots import Chain, Flags, Numbers, Tickets, numbers_of

COLD_SHARE = 0.1  # of DRAM: the part that would leave next
WALK = 64  # slots looked at in a step, after skipping at most SKIP that are on disk
SKIP = 4096
MAX_COLD_CHAINS, MAX_CHAINS = 32, 4096  # looked up at a time; only the cold ones are ranked
COLD_S, SPARE_S = 0.1, 1.0  # between two such lookups


@dataclass(frozen=True)
class Batch:
    """What to write: for each disk slot its host slots, head first, its key and its depth."""

    program: str
    tickets: Tickets
    keys: list[Key]
    depths: list[int]


@dataclass
class _Walk:
    """How far a chain has been walked: the next look is at the blocks before `end`, and the last
    one goes back to `first`. `is_cold`: it leaves soon."""

    chain: Chain
    first: int
    end: int
    is_cold: bool = False


class Saving:
    """Walks what would leave DRAM next, a few slots per step; changes nothing in DRAM but marks."""

    def __init__(
        self,
        dram: HostIndex,
        marks: Marks,
        disk: DiskIndex,
        slot_blocks: int,
        budget: Budget,
        account: Account,
    ) -> None:
        self._dram = dram
        self._marks = marks
        self._disk = disk
        self._length = slot_blocks
        self._budget = budget
        self._account = account
        # Chains to walk, the next one last: those that leave soon, and those that do not.
        self._cold: list[_Walk] = []
        self._spare: list[_Walk] = []
        self._new: list[_Walk] = []  # those that were stored last
        self._came: dict[str, None] = {}  # programs that stored something since
        self._cold_at = self._spare_at = -math.inf
        self._has_found = False  # something to write was found since the last pass over all began
        self._version = -1  # of DRAM, when that pass began
        self._has_spare = False  # whether the budget allows more than what leaves soon

    @property
    def goes_on(self) -> bool:
        """Whether there may be more to write, so that an idle engine must ask again."""
        has_walks = self.has_new or bool(self._cold or self._spare)
        return has_walks or (self._has_spare and self._is_due)

    @property
    def has_new(self) -> bool:
        """Whether something newly stored has not been looked at yet."""
        return bool(self._new or self._came)

    def has_spare(self, now: float) -> bool:
        """Whether the budget allows more than what leaves soon. On a disk smaller than DRAM each
        block would push out another, which would then be written again."""
        has_room = self._num_fit >= self._dram.num_slots
        return has_room and self._budget.fill(now) > SPARE_FILL

    @property
    def _num_fit(self) -> int:
        """How many blocks the disk can hold; beyond this, an idle engine would write on and on."""
        return (self._disk.num_slots - self._disk.num_bad) * self._length

    def came(self, program: str) -> None:
        """Something of the program was stored: with budget to spare, it is written at once."""
        self._came[program] = None

    def next(self, num_wanted: int, rank: Rank | None, now: float) -> Batch | None:
        """Return what to write, at most `num_wanted` disk slots; None: nothing in this step."""
        for walks in self._next_walks(rank, now):
            walk = walks[-1]
            batch = self._look(walk, num_wanted, self._budget.least_uses(now))
            if walk.end <= walk.first:
                walks.pop()
            if batch is not None:
                self._has_found = True
                return batch
        return None

    def clear(self) -> None:
        """Forget what was to be written."""
        self._cold, self._spare, self._has_found = [], [], False
        self._new, self._came = [], {}

    # --- where to look ----------------------------------------------------------------
    def _next_walks(self, rank: Rank | None, now: float) -> list[list[_Walk]]:
        """The lists in which walks are left, the most urgent first."""
        if not self._cold and now >= self._cold_at:
            self._cold_at = now + COLD_S
            self._cold = self._coldest(rank)
        self._has_spare = self.has_spare(now)
        if not self._has_spare:
            self._spare, self._has_found = [], False
            self._new, self._came = [], {}
        elif not self._spare and now >= self._spare_at and self._is_due:
            self._spare_at, self._has_found = now + SPARE_S, False
            self._version = self._dram.version
            chains = itertools.islice(self._dram.next_to_leave(None), MAX_CHAINS)
            self._spare = [_Walk(chain, 0, len(chain.tickets)) for chain in chains][::-1]
        if not self._new and self._came:
            program = next(iter(self._came))
            del self._came[program]
            new = self._dram.chains_of(program)
            self._new = [_Walk(chain, 0, len(chain.tickets)) for chain in new]
        return [walks for walks in (self._cold, self._new, self._spare) if walks]

    @property
    def _is_due(self) -> bool:
        return self._has_found or self._version != self._dram.version

    def _coldest(self, rank: Rank | None) -> list[_Walk]:
        dram, walks = self._dram, []
        num_cold = max(math.ceil(COLD_SHARE * dram.num_slots), self._length)
        num_left = min(num_cold, self._num_fit) - dram.num_free
        for chain in itertools.islice(dram.next_to_leave(rank), MAX_COLD_CHAINS):
            if num_left <= 0:
                break
            length = len(chain.tickets)
            walks.append(_Walk(chain, max(0, length - num_left), length, is_cold=True))
            num_left -= length
        return walks[::-1]

    def place(self, batch: Batch) -> Numbers:
        """Reserve disk slots for the batch: for the first of it, where others are busy. What leaves
        the disk for them may be in DRAM still; the last block of a disk slot stands for all of it.
        """
        placed = self._disk.reserve(batch.program, batch.keys, batch.depths)
        if self._disk.displaced:
            self._note_displaced(self._disk.displaced)
        return placed

    # --- what is there ----------------------------------------------------------------
    def _note_displaced(self, names: Sequence[Key]) -> None:
        numbers = self._dram.slots_of(names)
        numbers = numbers[numbers >= 0]
        self._marks.is_saved[numbers] = False
        self._marks.displaced_at[numbers] = self._dram.version
        self._has_found = True

    def _look(self, walk: _Walk, num_wanted: int, least_uses: float) -> Batch | None:
        """Look at some of the blocks before the walk's place, then move that place back past
        them."""
        length, tickets = self._length, walk.chain.tickets
        end = min(walk.end, len(tickets))  # its tail may have left since
        end = self._unsaved_end(tickets[max(0, end - SKIP) : end], max(0, end - SKIP))
        walk.end = max(walk.first, end - max(WALK, length))
        begin = max(0, walk.end - length + 1)
        tickets = tickets[begin:end]
        lasts = self._whole(tickets)
        lasts = lasts[lasts + begin >= walk.end]
        if len(lasts) > self._disk.num_free:
            lasts = lasts[self._may_displace(numbers_of(tickets)[lasts], walk.is_cold)]
        lasts = self._admitted(numbers_of(tickets), lasts, least_uses)
        if len(lasts) > num_wanted:
            lasts = lasts[len(lasts) - num_wanted :]
            walk.end = begin + int(lasts[0])
        if not len(lasts):
            return None
        places = (lasts[:, None] + np.arange(1 - length, 1)).ravel()
        numbers = numbers_of(tickets)[lasts]
        depths = self._marks.places[numbers] // length
        keys = self._dram.keys_at(numbers)
        return Batch(walk.chain.program, tickets[places], keys, depths.tolist())

    def _may_displace(self, numbers: Numbers, is_cold: bool) -> Flags:
        """Which of these slots may be written even if others leave the disk for them."""
        displaced_at = self._marks.displaced_at[numbers]
        is_new: Flags = displaced_at == NEVER
        return is_new | (displaced_at != self._dram.version) if is_cold else is_new

    def _unsaved_end(self, tickets: Tickets, begin: int) -> int:
        """Where the last of these disk slots ends that is not wholly on disk; if all are, `begin`,
        the place of the first block."""
        unsaved = (~self._marks.is_saved[numbers_of(tickets)]).nonzero()[0]
        if not len(unsaved):
            return begin
        return begin + min(len(tickets), int(unsaved[-1]) + self._length)

    def _whole(self, tickets: Tickets) -> Numbers:
        """Where those disk slots end whose blocks are all there, but not all on disk yet."""
        length, marks, numbers = self._length, self._marks, numbers_of(tickets)
        places = marks.places[numbers]
        lasts: Numbers = (places % length == length - 1).nonzero()[0]
        lasts = lasts[lasts >= length - 1]
        if length > 1:
            lasts = lasts[places[lasts] - places[lasts - length + 1] == length - 1]
        num_ready = np.concatenate([[0], np.cumsum(self._dram.are_ready(tickets))])
        lasts = lasts[num_ready[lasts + 1] - num_ready[lasts + 1 - length] == length]
        return lasts[~marks.is_saved[numbers[lasts]]]

    def _admitted(self, numbers: Numbers, lasts: Numbers, least_uses: float) -> Numbers:
        """Those that are neither on disk nor on the way there, and may be written."""
        if not len(lasts):
            return lasts
        marks, length = self._marks, self._length
        keys = self._dram.keys_at(numbers[lasts])
        for last in lasts[self._disk.find(keys) >= 0].tolist():  # its blocks were computed anew
            marks.is_saved[numbers[last - length + 1 : last + 1]] = True
        lasts = lasts[np.array([key not in self._disk for key in keys])]
        uses = marks.uses[numbers[lasts]]
        refused = lasts[uses < least_uses]
        for last in refused[~marks.is_refused[numbers[refused]]].tolist():
            why = "once" if marks.uses[numbers[last]] == 1 else "budget"
            self._account.count("disk_refused_blocks", length, why)
            marks.is_refused[numbers[last - length + 1 : last + 1]] = True
        return lasts[uses >= least_uses]
