"""Reading: brings to DRAM what a turn wants from the disk, while the turn waits in the queue.

Reads begin when the turn arrives, in the order of its chain, if they and the load take less time
than a new prefill. A turn about to be admitted while its reads are under way waits for them, before
it has a block of VRAM, until a deadline, and then never again: what is in DRAM is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Key, KvGroups
from continuum_connector.scheduler.tiers.disk_index import DiskIndex
from continuum_connector.scheduler.tiers.events import TierEvents
from continuum_connector.scheduler.tiers.eviction import Rank, least
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Numbers, Tickets, numbers_of
from continuum_connector.scheduler.tiers.traffic import Owner, Traffic
from continuum_connector.scheduler.tiers.transfers import (
    DiskPlaces,
    Kind,
    Transfer,
    TransferState,
)
from continuum_connector.scheduler.tiers.wanted import CopyCosts, OnDisk, Prompt, Wanted, block_keys

MAX_READ_BYTES = 64 << 20  # of one order, on a rank: each order that settles is a longer hit
PROBE_S = 60.0  # after the last read, until a disk that seemed too slow is tried again
TRIES_PER_STEP = 4  # to read on: each looks up a whole prompt, and thousands may wait for room


@dataclass(frozen=True)
class DiskPlan:
    """A disk tier as configured: blocks of a disk slot, bytes of a block on one rank, how long a
    turn waits, bytes written per day (0: no bound), and what copies and prefills cost."""

    slot_blocks: int
    block_bytes: int
    timeout_s: float
    write_budget: int
    costs: CopyCosts


@dataclass(eq=False)
class _Wait:
    """What a turn waits for. `reads`: the first one last; `start`: where its load begins, in
    blocks; `came`: the places in its chain of what reads brought. `rest`: what is still to be read
    if DRAM had no room for it but may soon; `lacks`: the first block that got no room. `told`: what
    is told of it all."""

    deadline: float
    told: OnDisk
    reads: list[_Read] = field(default_factory=list)
    start: int = 0
    came: list[Numbers] = field(default_factory=list)
    rest: Wanted | None = None
    lacks: Key = b""


@dataclass(eq=False)
class _Read:
    """A read under way: what it brings where, and which turns wait for it."""

    transfer: Transfer
    tickets: Tickets
    places: Numbers
    waits: list[_Wait] = field(default_factory=list)


class Reading:
    """Reads for turns that wait, and what is remembered about these turns.

    `owner`: owner of the transfers, None while there is no disk; `rank_at`: programs' worth, now.
    """

    def __init__(
        self,
        plan: DiskPlan,
        dram: HostIndex,
        disk: DiskIndex,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
    ) -> None:
        self._plan = plan
        self._dram = dram
        self._disk = disk
        self._size = groups.hash_size
        self._traffic = traffic
        self._account = account
        self._waits: dict[str, _Wait] = {}
        self._reads: dict[int, _Read] = {}  # under way, by transfer
        self._read_to: dict[int, _Read] = {}  # by the host slot that it writes to
        self._num_reading = 0  # blocks, of the reads under way
        self._began = -math.inf  # when the last of them was begun
        self._full: tuple[int, ...] = ()  # `_stand` when a turn last found no room
        self._num_tries = 0  # to read on, in this step
        self.has_waiting: Callable[[str], bool] = lambda program: False  # has a waiting turn
        self.has_new: Callable[[], bool] = lambda: False  # blocks to write at once
        self.owner: Owner | None = None
        self.max_read_bytes = MAX_READ_BYTES
        self.events: TierEvents | None = None  # of DRAM, to which the blocks come
        self.rank_at: Callable[[float], Rank | None] = lambda now: None

    @property
    def is_stuck(self) -> bool:
        """Whether the disk has owed an answer for so long that it is asked nothing until then."""
        return self._traffic.oldest_of_disk_s > self._plan.timeout_s

    # --- what turns ask ---------------------------------------------------------------
    def expect(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        supersedes: bool,
        now: float,
    ) -> OnDisk | None:
        """A turn has arrived, or is about to be admitted: begin to read what it will want, if that
        is worth it, beside what is being read for it already. `num_vram_tokens`: what VRAM seems to
        have of it. `num_turns`: turns under way, which a prefill delays. `supersedes`: no other
        turn of its program runs. Returns what the disk has of it; None if it has nothing of use."""
        length, hashes = self._plan.slot_blocks, request.block_hashes
        num_disk_slots = min(len(hashes), request.num_tokens // self._size) // length
        if num_disk_slots and (self.owner is None or self.is_stuck):
            return OnDisk(why="down" if self.owner is None else "stuck")
        if not num_disk_slots or not self._disk.num_ready:
            return None
        names = block_keys(hashes[length - 1 : num_disk_slots * length : length])
        on_disk = self._disk.find(names)
        if (on_disk < 0).all():
            return None
        self._disk.shelves.use(program, on_disk[on_disk >= 0], supersedes)
        keys, start = block_keys(hashes[: num_disk_slots * length]), num_vram_tokens // self._size
        wanted = Wanted(program, request, keys, names, start)
        prompt = Prompt.look(wanted, self._dram, self._disk)
        depths = prompt.missing(length)
        told, patience_s = self._weigh(prompt, depths, max(1, num_turns))
        wait = _Wait(now + min(self._plan.timeout_s, patience_s), told)
        reads = self._under_way(prompt.in_dram[start:])
        if len(depths) and not told.why:
            reads += self._begin(wait, prompt, depths, now)
        elif len(depths) and now - self._began >= PROBE_S:
            self._begin(None, prompt, depths[:1], now)  # only to see how fast it is by now
        self._join(wait, reads, wanted)
        before = self._waits.pop(request.request_id, None)
        if before is not None:
            wait.came = before.came
            self._give_up(before)
        if wait.reads or wait.rest is not None or wait.came:
            self._waits[request.request_id] = wait
        return told if told.num_tokens or wait.reads else None

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether the turn is to wait for its reads; once it is not, it never is again."""
        wait = self._waits.get(request_id)
        if wait is None:
            return False
        while wait.reads and wait.reads[-1].transfer.id not in self._reads:
            wait.reads.pop()
        if not wait.reads and wait.rest is not None and now < wait.deadline:
            self._go_on(wait, wait.rest, now)
        if (wait.reads or wait.rest is not None) and now < wait.deadline:
            return True
        if wait.rest is not None:
            wait.told.why = "room"
        elif wait.reads:
            wait.told.why = "deadline"
        self._give_up(wait)
        return False

    def looked(self, request_id: str, num_vram_tokens: int) -> None:
        """Its load would begin after these tokens."""
        if (wait := self._waits.get(request_id)) is not None:
            wait.start = num_vram_tokens // self._size

    def num_tokens(self, request_id: str, num_loaded: int) -> int:
        """How many of the tokens loaded for it came from disk since it arrived. Each counts once,
        even if it left DRAM while the turn waited for room, and was read again."""
        wait = self._waits.get(request_id)
        if wait is None or not wait.came:
            return 0
        came, end = np.unique(np.concatenate(wait.came)), wait.start + num_loaded // self._size
        return int(np.count_nonzero((came >= wait.start) & (came < end))) * self._size

    def forget(self, request_id: str) -> None:
        """The turn is over, or its client went away: it waits for no read any more."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._give_up(wait)

    # --- what happens to reads --------------------------------------------------------
    def new_step(self) -> None:
        """Turns that wait for room may try again."""
        self._num_tries = 0

    def settled(self, transfer: Transfer) -> None:
        """A read is over: what it brought can be found in DRAM, marked as on disk as well."""
        read, is_done = self._reads.pop(transfer.id), transfer.state is TransferState.DONE
        numbers = numbers_of(read.tickets)
        self._num_reading -= len(numbers)
        for number in numbers.tolist():
            del self._read_to[number]
        if is_done and self._dram.marks is not None:
            self._dram.marks.is_saved[numbers[self._dram.are_there(read.tickets)]] = True
        self._dram.settle(read.tickets, stored=is_done)
        if self.events is not None:
            self.events.stored(transfer.id, set(self._dram.keys_of(read.tickets)))
        for wait in read.waits:
            if is_done:
                wait.came.append(read.places)
            else:
                wait.told.why = wait.told.why or "failed"

    def clear(self) -> None:
        """What is being read is no longer wanted."""
        for read in self._reads.values():
            self._dram.disown(read.tickets)
        for wait in self._waits.values():
            if wait.reads or wait.rest is not None:
                wait.told.why = "cleared"
            wait.reads, wait.rest = [], None
        self._waits.clear()

    # --- parts ------------------------------------------------------------------------
    def _join(self, wait: _Wait, reads: list[_Read], wanted: Wanted) -> None:
        """Let the turn wait for these reads."""
        for read in reads:
            read.waits.append(wait)
            self._describe(read, wanted.request, wanted.keys)
        wait.reads = reads[::-1]

    def _go_on(self, wait: _Wait, wanted: Wanted, now: float) -> None:
        """Read on if there is room by now: where one turn found none, no other does."""
        is_full = self._stand == self._full and wait.lacks not in self._dram
        if is_full or self._num_tries >= TRIES_PER_STEP:
            return
        self._num_tries += 1
        prompt, wait.rest = Prompt.look(wanted, self._dram, self._disk), None
        depths = prompt.missing(self._plan.slot_blocks)
        reads = self._under_way(prompt.in_dram[wanted.start :])
        if len(depths):
            reads += self._begin(wait, prompt, depths, now)
        self._join(wait, reads, wanted)

    @property
    def _stand(self) -> tuple[int, ...]:
        """Changes whenever DRAM may have more room."""
        traffic = self._traffic
        copies = traffic.num_of(Kind.STORE), traffic.num_of(Kind.WRITE)
        return self._dram.version, *copies, int(self.has_new())

    def _makes_room(self, now: float) -> bool:
        """Whether blocks of DRAM are on their way to the disk, and may leave soon."""
        marks = self._dram.marks
        return marks is not None and marks.passes_on(now) and any(self._stand[1:])

    def _weigh(self, prompt: Prompt, depths: Numbers, num_turns: int) -> tuple[OnDisk, float]:
        """What the disk has of what is missing, and how long the turn may wait for it."""
        costs, length, size = self._plan.costs, self._plan.slot_blocks, self._size
        num_gained, num_before = prompt.gained(depths, length)
        prefill_s = costs.prefill_s(num_gained * size, num_before * size)
        if not costs.knows_prefill:
            prefill_s = math.inf  # the deadline bounds the wait
        told = OnDisk(prefill_s=prefill_s * num_turns)
        if len(depths):
            num, num_loaded = prompt.copied(depths, length)
            told.num_tokens = num * size
            told.read_s = costs.read_s(self._num_reading + num) + costs.load_s(num_loaded)
            told.why = "" if told.read_s < told.prefill_s else "prefill"
        return told, 2 * prefill_s

    def _under_way(self, numbers: Numbers) -> list[_Read]:
        """Reads into these slots that are under way already."""
        if not self._read_to:
            return []
        found = (self._read_to.get(number) for number in numbers.tolist())
        return list(dict.fromkeys(read for read in found if read is not None))

    def _begin(
        self, wait: _Wait | None, prompt: Prompt, depths: Numbers, now: float
    ) -> list[_Read]:
        """Reserve slots in DRAM, as a store of that program would, and queue reads into as many as
        it gets. Where room will be made soon, nothing live that is on no disk yet leaves for this,
        and the turn waits for the rest."""
        length, end = self._plan.slot_blocks, (int(depths[-1]) + 1) * self._plan.slot_blocks
        is_wanted = np.zeros(end, np.bool_)
        is_wanted.reshape(-1, length)[depths] = ~prompt.is_there.reshape(-1, length)[depths]
        chain = (is_wanted | (prompt.in_dram[:end] >= 0)).nonzero()[0].tolist()
        wanted, num_evicted = prompt.wanted, self._dram.num_evicted
        keys, program = [wanted.keys[place] for place in chain], wanted.program
        can_wait = wait is not None and self._makes_room(now)
        rank = self.rank_at(now)
        rank = least(program, rank) if can_wait else rank
        tickets = self._dram.reserve(keys, program, now, rank, supersedes=False, places=chain)
        self._account.count("dram_evicted_blocks", self._dram.num_evicted - num_evicted)
        targets = np.full(end, -1, np.int64)
        targets[is_wanted.nonzero()[0][: len(tickets)]] = tickets
        has_room = (targets.reshape(-1, length)[depths] >= 0).any(axis=1)
        if wait is not None and can_wait and not has_room.all():
            lacks = int((is_wanted & (targets < 0)).argmax())
            wait.rest, wait.lacks, self._full = wanted, wanted.keys[lacks], self._stand
        elif wait is not None and not has_room.all():
            wait.told.why = "room"
        depths = depths[has_room]
        step = max(1, self.max_read_bytes // (length * self._plan.block_bytes))
        parts = (depths[first : first + step] for first in range(0, len(depths), step))
        return [self._read(prompt, part, targets, now) for part in parts]

    def _read(self, prompt: Prompt, depths: Numbers, targets: Tickets, now: float) -> _Read:
        assert self.owner is not None
        wanted = prompt.wanted
        length, numbers = self._plan.slot_blocks, prompt.on_disk[depths]
        places = (depths[:, None] * length + np.arange(length)).ravel()
        names = [wanted.names[depth] for depth in depths.tolist()]
        disk = DiskPlaces(numbers.astype(np.int32), names, depths.tolist())
        self._disk.acquire(numbers)
        self._began = now
        what = wanted.program, disk, targets[places]
        transfer = self._traffic.of_disk(self.owner, Kind.READ, *what, now)
        transfer.num_ahead = self._num_reading
        self._num_reading += len(transfer)
        places = places[transfer.slots >= 0]
        read = self._reads[transfer.id] = _Read(transfer, targets[places], places)
        self._read_to.update(dict.fromkeys(numbers_of(read.tickets).tolist(), read))
        return read

    def _describe(self, read: _Read, request: Any, keys: Sequence[Key]) -> None:
        if self.events is not None and len(read.waits) == 1:
            places = read.places.tolist()
            ends = [(place + 1) * self._size for place in places]
            named = [keys[place] for place in places]
            self.events.describe(read.transfer.id, request, named, ends)

    def _give_up(self, wait: _Wait) -> None:
        """The turn waits no more. What no turn waits for and has not begun is not read."""
        reads, wait.reads, wait.rest = wait.reads, [], None
        for read in reads:
            if read.transfer.id in self._reads:
                read.waits.remove(wait)
                if not read.waits:
                    self._dram.disown(read.tickets)
                    self._traffic.cancel(read.transfer)
