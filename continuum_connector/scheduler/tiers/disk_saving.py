"""Saving: which blocks of DRAM are written to the disk next.

What would leave DRAM next is written before it has to, so that eviction stays instant: a store that
needs room never waits for a disk, and what is not written by then is dropped. With budget to spare
the rest is written too, for a restart to find. Nothing is written twice, and nothing of programs
that are done. What another write displaced is written again where there is room, or when it is
about to leave DRAM and DRAM has changed: where the disk is small each write would displace what the
next one writes, and an idle server would write for ever.

Budget, Failures, Attempts, Depth: how much may be written, how much of it at once, and whether
anything may. A budget per day spares the drive. A disk that takes no writes is still read, and a
write is tried now and then. How much is under way follows the disk: a fast one must not run dry
during a long step, and a slow one must not be given what it cannot write in time.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Flags, Key, Numbers
from continuum_connector.scheduler.tiers.disk_index import NEVER, DiskIndex, Marks
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Chain, Rank, Tickets, numbers_of

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
            numbers = self._dram.slots_of(self._disk.displaced)
            numbers = numbers[numbers >= 0]
            self._marks.is_saved[numbers] = False
            self._marks.displaced_at[numbers] = self._dram.version
            self._has_found = True
        return placed

    # --- what is there ----------------------------------------------------------------
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


DAY_S = 24 * 3600.0
# Share of the budget. Above it everything is written; below it only what leaves DRAM next, and the
# less is left, the more often a block must have been used.
SPARE_FILL = 0.5
AHEAD_SHARE = 1 / 96  # of the budget, a quarter of an hour's: what is said to be spent before it is
FAILED_S = 3600.0  # failures longer ago do not count
MAX_FAILED = 3  # failed writes, after which none is begun
RETRY_S = 600.0  # except for one this long after the last failure
LEAST_DEPTH, MOST_DEPTH = 16, 256  # writes under way
FASTER = 64  # for each disk slot written in time, 1 / FASTER more may be under way


class Budget:
    """Bytes that may be written. They come evenly over the day, and at most a day's are kept, so
    that a burst may write what idle hours left.

    The less of the last half is left, the more often a block must have been used, so that what
    little may be written is what is read most.

    What is spent is kept over a restart, or a server that is killed again and again would begin
    each time with a day's. It is said ahead: whoever is killed has spent no more than was said.
    """

    def __init__(self, bytes_per_day: int, least_bytes: int) -> None:
        """`bytes_per_day`: 0 for no bound; `least_bytes`: this many can be kept in any case."""
        self._per_second = bytes_per_day / DAY_S
        self._capacity = float(max(bytes_per_day, least_bytes)) if bytes_per_day else 0.0
        self._level = self._capacity
        self._since = -math.inf
        self._said, self._said_at = -math.inf, 0.0  # to be spent, and when

    def fill(self, now: float) -> float:
        """The share that is left of what can be kept, 0 to 1."""
        if not self._capacity:
            return 1.0
        if now > self._since:
            passed = now - self._since if self._since > -math.inf else 0.0
            self._level = min(self._capacity, self._level + passed * self._per_second)
            self._since = now
        return max(0.0, self._level / self._capacity)

    def least_uses(self, now: float) -> float:
        """How many turns must have used a block to be written; infinite if nothing is left."""
        fill = self.fill(now)
        if fill <= 0.0:
            return math.inf
        return float(2 ** max(0, math.ceil((SPARE_FILL - fill) * 10 - 1e-9)))

    def take(self, num_bytes: int) -> None:
        """Count these bytes as written; a little may be owed after that. Negative: bytes that were
        taken were not written after all."""
        self._level -= num_bytes

    def restore(self, num_bytes: int, age_s: float) -> None:
        """An earlier server had spent so much `age_s` ago. Before anything is taken."""
        left = max(0.0, num_bytes - age_s * self._per_second)
        self._level = min(self._level, max(0.0, self._capacity - left))

    def to_keep(self, now: float) -> int | None:
        """What a restart is to find spent, in bytes, if what was said last is no longer enough."""
        if not self._capacity:
            return None
        spent = (1.0 - self.fill(now)) * self._capacity
        ahead = AHEAD_SHARE * self._capacity
        said = self._said - (now - self._said_at) * self._per_second
        if spent + ahead / 2 <= said:
            return None
        self._said, self._said_at = spent + ahead, now
        return int(self._said)


class Failures:
    """How many attempts failed within the last hour."""

    def __init__(self) -> None:
        self._failed: deque[float] = deque()
        self.known_at = -math.inf  # a failure of what began before tells nothing new

    def add(self, begun: float, now: float) -> int:
        """One begun at `begun` has failed; those under way at the same time fail as one. Returns
        how many have by now, 0 if it is no news."""
        if begun <= self.known_at:
            return 0
        self.known_at = now
        return self.note(now)

    def note(self, now: float) -> int:
        """One has failed, and counts whatever failed with it. Returns how many have by now."""
        self._failed.append(now)
        while now - self._failed[0] > FAILED_S:
            self._failed.popleft()
        return len(self._failed)

    def clear(self) -> None:
        """Forget the failures: their cause is mended."""
        self._failed.clear()


class Attempts:
    """Whether the disk is written to. After too many failures it is not, except for a try now and
    then; if one succeeds, writing begins again."""

    def __init__(self) -> None:
        self._failures = Failures()
        self._retry_at = math.inf  # if writing is over
        self.is_over = False

    def may_begin(self, now: float, num_under_way: int) -> bool:
        return not self.is_over or (now >= self._retry_at and not num_under_way)

    def fail(self, begun: float, now: float) -> bool:
        """A write begun at `begun` has failed. True: with this one, writing is over."""
        if not (num_failed := self._failures.add(begun, now)):
            return False
        was_over, self.is_over = self.is_over, self.is_over or num_failed >= MAX_FAILED
        self._retry_at = now + RETRY_S
        return self.is_over and not was_over

    def succeed(self, begun: float) -> bool:
        """A write begun at `begun` is done. True: with this one, writing begins again."""
        if not self.is_over or begun <= self._failures.known_at:
            return False
        self.is_over = False
        self._failures.clear()
        return True


class Depth:
    """How many writes are under way at once, and of how many disk slots.

    Enough that the disk does not run dry before the next step, however long that is, and no more,
    because each keeps slots of DRAM. With a slow disk, no more than it ends before they are late,
    or most of what it writes would be for nothing. Reads do not wait for writes: the threads of a
    disk take reads first.
    """

    def __init__(self, order_slots: int) -> None:
        """`order_slots`: disk slots of the largest order."""
        self._order_slots = order_slots
        self._most = LEAST_DEPTH
        self._num_begun = 0  # under way after the last step
        self._level = math.inf  # disk slots; bounded once a write was late
        self._slowed_at = -math.inf

    @property
    def num_slots(self) -> int:
        """How many disk slots the writes under way may have in all."""
        return int(min(self._level, MOST_DEPTH * self._order_slots))

    def most(self, num_left: int) -> int:
        """How many writes there may be in this step; `num_left` are still under way."""
        if not num_left and self._num_begun >= self._most:
            self._most = min(2 * self._most, MOST_DEPTH)
        elif 2 * num_left > self._most:
            self._most = max(self._most // 2, LEAST_DEPTH)
        return self._most

    def begun(self, num: int) -> None:
        """Note how many are under way now."""
        self._num_begun = num

    def ended(self, num_slots: int, begun: float, now: float, is_late: bool) -> None:
        """A write of `num_slots` disk slots, begun at `begun`, is done, or was late."""
        if not is_late:
            self._level += num_slots / FASTER
        elif begun > self._slowed_at:
            under_way = min(self._level, self._most * self._order_slots)
            self._level, self._slowed_at = max(1.0, under_way / 2), now
