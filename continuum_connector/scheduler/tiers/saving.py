"""Saving: which blocks of DRAM are written to the disk next.

What would leave DRAM next is written ahead of it, so that eviction stays instant: who needs room
never waits for a disk, and what is not written by then is dropped. With budget to spare the rest is
written too, for a restart to find. Nothing is written twice, and nothing of programs that are over.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.disk_index import DiskIndex
from continuum_connector.scheduler.tiers.eviction import Rank
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.marks import Marks
from continuum_connector.scheduler.tiers.slots import Chain, Numbers, Tickets, numbers_of
from continuum_connector.scheduler.tiers.writing import SPARE_FILL, Budget

COLD_SHARE = 0.1  # of DRAM: what would leave next
WALK = 64  # slots looked at in a step, behind at most so many that are on disk
SKIP = 4096
MAX_COLD_CHAINS, MAX_CHAINS = 32, 4096  # looked up at a time; the worth of the first is asked for
COLD_S, SPARE_S = 0.1, 1.0  # between two such times


@dataclass(frozen=True)
class Batch:
    """What to write: of each disk slot the host slots, head first, its key and its depth."""

    program: str
    tickets: Tickets
    keys: list[Key]
    depths: list[int]


@dataclass
class _Walk:
    """Where in a chain: the next look is at the blocks before `end`, the last at those from
    `first` on."""

    chain: Chain
    first: int
    end: int


class Saving:
    """Walks what would leave DRAM next, a few slots per step; changes nothing there but marks."""

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
        disk.leaving = self._forget
        self._budget = budget
        self._account = account
        # Chains to walk, the next one last: those that leave soon, those that do not.
        self._cold: list[_Walk] = []
        self._spare: list[_Walk] = []
        self._new: list[_Walk] = []  # those that came lately
        self._came: dict[str, None] = {}  # programs of whom something did
        self._cold_at = self._spare_at = -math.inf
        self._has_found = False  # something to write, since the last pass over all began
        self._version = -1  # of DRAM, at that time
        self._has_spare = False  # budget, for more than what leaves soon

    @property
    def goes_on(self) -> bool:
        """Whether more may be to write, so that an idle engine is to ask again."""
        has_walks = self.has_new or bool(self._cold or self._spare)
        return has_walks or (self._has_spare and self._is_due)

    @property
    def has_new(self) -> bool:
        """Whether something that came lately has not been looked at."""
        return bool(self._new or self._came)

    def has_spare(self, now: float) -> bool:
        """Whether there is budget for more than what leaves soon. On a disk smaller than DRAM each
        block would push out one that is to be written again."""
        has_room = self._num_fit >= self._dram.num_slots
        return has_room and self._budget.fill(now) > SPARE_FILL

    @property
    def _num_fit(self) -> int:
        """How many blocks the disk can hold; an engine at rest would write more over and over."""
        return (self._disk.num_slots - self._disk.num_bad) * self._length

    def came(self, program: str) -> None:
        """Something of it has come to DRAM: if there is budget, it goes on at once."""
        self._came[program] = None

    def next(self, num_wanted: int, rank: Rank | None, now: float) -> Batch | None:
        """What is to be written now, `num_wanted` disk slots at most; None: nothing in this step,
        or at all."""
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
        """What was to be written is gone."""
        self._cold, self._spare, self._has_found = [], [], False
        self._new, self._came = [], {}

    # --- where to look ----------------------------------------------------------------
    def _next_walks(self, rank: Rank | None, now: float) -> list[list[_Walk]]:
        """Those that have somewhere to go, the urgent one first."""
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
            walks.append(_Walk(chain, max(0, length - num_left), length))
            num_left -= length
        return walks[::-1]

    # --- what is there ----------------------------------------------------------------
    def _forget(self, names: list[Key]) -> None:
        """They leave the disk: what DRAM has of them is to be written again. A disk slot is asked
        for by its last block."""
        numbers = self._dram.slots_of(names)
        self._marks.is_saved[numbers[numbers >= 0]] = False
        self._has_found = True

    def _look(self, walk: _Walk, num_wanted: int, least_uses: float) -> Batch | None:
        """Look at the last so many blocks before the walk's place, and let it go on from there."""
        length, tickets = self._length, walk.chain.tickets
        end = min(walk.end, len(tickets))  # its tail may have left since
        end = self._unsaved_end(tickets[max(0, end - SKIP) : end], max(0, end - SKIP))
        walk.end = max(walk.first, end - max(WALK, length))
        begin = max(0, walk.end - length + 1)
        tickets = tickets[begin:end]
        lasts = self._whole(tickets)
        lasts = lasts[lasts + begin >= walk.end]
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

    def _unsaved_end(self, tickets: Tickets, begin: int) -> int:
        """Where the last disk slot of these ends of which something is not on disk; `begin`, the
        place of the first of them, if all is."""
        unsaved = (~self._marks.is_saved[numbers_of(tickets)]).nonzero()[0]
        if not len(unsaved):
            return begin
        return begin + min(len(tickets), int(unsaved[-1]) + self._length)

    def _whole(self, tickets: Tickets) -> Numbers:
        """Where the blocks of a disk slot end of which all are there, and some not on disk yet."""
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
        """Those of them that are not on disk, or on the way there, and may be written."""
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
