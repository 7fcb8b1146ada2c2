"""Reading: brings to DRAM what a turn wants from the disk, while the turn waits in the queue.

Reads begin when the turn arrives, in the order of its chain, if they and the load take less time
than a new prefill. A turn about to be admitted while its reads are under way waits for them, before
it has a block of VRAM, until a deadline, and then never again: what is in DRAM is loaded.

Wanted: what a turn wants from the disk; Prompt: where each block of it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from continuum_connector.observe.account import Account, Told
from continuum_connector.scheduler.kv_groups import Key, KvGroups, Numbers, full_keys
from continuum_connector.scheduler.tiers.base import TierEvents
from continuum_connector.scheduler.tiers.disk_index import DiskIndex, Marks
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Rank, Tickets, numbers_of
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
    Transfer,
    TransferState,
)

PROBE_S = 60.0  # after the last read, until a disk that seemed too slow is tried again
MAX_READ_BYTES = 64 << 20  # of one order, on a rank: each order that settles is a longer hit
TRIES_PER_STEP = 4  # to read on: each looks up a whole prompt, and thousands may wait for room


@dataclass(frozen=True)
class DiskPlan:
    """A disk tier as configured: blocks of a disk slot, bytes of a block on one rank, how long a
    turn waits, bytes written per day (0: no bound), and what copies and prefills cost (Costs)."""

    slot_blocks: int
    block_bytes: int
    timeout_s: float
    write_budget: int
    costs: Any


@dataclass(eq=False)
class OnDisk:
    """What the disk had for a turn when the turn last asked it, for the trace and the answer.

    `num_tokens`: of its prompt, those that were on disk and neither in VRAM nor in DRAM. `why`: why
    they, or some of them, were not read for it; "" if all were. `read_s`: what reading and loading
    them would have taken; `prefill_s`: what computing them costs all turns that it delays.
    """

    num_tokens: int = 0
    why: str = ""
    read_s: float = 0.0
    prefill_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, int | float | str] = {"tokens": self.num_tokens}
        if self.why:
            told["not_read"] = self.why
        if self.why == "prefill":
            told |= {"read_s": self.read_s, "prefill_s": self.prefill_s}
        return {"disk": told}


@dataclass(eq=False)
class Wait:
    """What a turn waits for. `reads`: the first one last; `came`: the places in its chain of what
    reads brought. `rest`: what is still to be read if DRAM had no room for it but may soon;
    `lacks`: the first block that got no room. `told`: what is told of it all."""

    deadline: float
    told: OnDisk
    reads: list[Read] = field(default_factory=list)
    came: list[Numbers] = field(default_factory=list)
    rest: Wanted | None = None
    lacks: Key = b""


@dataclass(eq=False)
class Read:
    """A read under way: what it brings where, and which turns wait for it."""

    transfer: Transfer
    tickets: Tickets
    places: Numbers
    waits: list[Wait] = field(default_factory=list)


class Reading:
    """Reads for turns that wait, what is remembered about these turns, and the reads under way."""

    def __init__(
        self,
        plan: DiskPlan,
        dram: HostIndex,
        marks: Marks,
        disk: DiskIndex,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
        owner: Owner,
        events: TierEvents | None,
        rank_now: Callable[[float], Rank | None],
        has_new: Callable[[], bool],
        takes_all: Callable[[float], bool],
    ) -> None:
        """`owner`: of the transfers. `events`: of DRAM, to which the blocks come. `rank_now`:
        programs' worth. `has_new`: whether there are blocks to write at once. `takes_all`: whether
        blocks of DRAM are on their way to the disk (Below)."""
        self._plan = plan
        self._dram = dram
        self._marks = marks
        self._disk = disk
        self._size = groups.hash_size
        self._traffic = traffic
        self._account = account
        self._owner = owner
        self._events = events
        self._waits: dict[str, Wait] = {}
        self._reads: dict[int, Read] = {}  # by transfer
        self._read_to: dict[int, Read] = {}  # by the host slot that it writes to
        self.num_blocks = 0  # that reads under way are to bring
        self.began = -math.inf  # when the last of them was begun
        self.max_read_bytes = MAX_READ_BYTES
        self._full: tuple[int, ...] = ()  # `_stand` when a turn last found no room
        self._num_tries = 0  # to read on, in this step
        self._rank_now = rank_now
        self._has_new = has_new
        self._takes_all = takes_all

    @property
    def is_stuck(self) -> bool:
        """Whether the disk has owed an answer for so long that it is asked nothing until then."""
        return self._traffic.oldest_below_s > self._plan.timeout_s

    # --- what turns ask ---------------------------------------------------------------
    def bring_up(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        now: float,
        before: Told | None = None,
    ) -> Told | None:
        """Begin to read what the turn will want, if that is worth it, beside what is being read for
        it already (Below). What was read since `before` is in DRAM by now."""
        told = self._bring_up(program, request, num_vram_tokens, num_turns, now)
        if told is None:
            return before
        told.num_tokens = max(told.num_tokens, before.num_tokens if before else 0)
        return told

    def _bring_up(
        self, program: str, request: Any, num_vram_tokens: int, num_turns: int, now: float
    ) -> OnDisk | None:
        """Returns what the disk has of the turn; None if it has nothing of use."""
        length, hashes = self._plan.slot_blocks, request.block_hashes
        num_disk_slots = min(len(hashes), request.num_tokens // self._size) // length
        if num_disk_slots and (not self._disk.is_open or self.is_stuck):
            return OnDisk(why="stuck" if self._disk.is_open else "down")
        lost, why_lost = self._marks.lost(program)
        if not num_disk_slots or not (self._disk.num_ready or lost):
            return None
        names = full_keys(hashes[length - 1 : num_disk_slots * length : length])
        on_disk = self._disk.find(names)
        if (on_disk < 0).all() and not lost:
            return None
        self._disk.shelves.use(program, on_disk[on_disk >= 0])
        keys, start = full_keys(hashes[: num_disk_slots * length]), num_vram_tokens // self._size
        wanted = Wanted(program, request, keys, names, start)
        prompt = Prompt.look(wanted, self._dram, on_disk)
        depths = prompt.missing(length)
        told, patience_s = self._weigh(prompt, depths, max(1, num_turns))
        wait = Wait(now + min(self._plan.timeout_s, patience_s), told)
        reads = self._into(prompt.in_dram[start:])
        if len(depths) and not told.why:
            reads += self._begin(wait, prompt, depths, now)
        elif len(depths) and now - self.began >= PROBE_S:
            self._begin(None, prompt, depths[:1], now)  # only to see how fast it is by now
        self._join(wait, reads, wanted)
        self._replace_wait(request.request_id, wait)
        if lost and lost in prompt.nowhere(length):
            told.why = told.why or why_lost
        return told if told.num_tokens or wait.reads or told.why else None

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
        self._leave(wait)
        return False

    def num_tokens(self, request_id: str, start: int, num_loaded: int) -> int:
        """How many of the tokens loaded for it, from `start` on, came from disk since it arrived.
        Each counts once, even if it left DRAM while the turn waited for room, and was read again.
        """
        wait = self._waits.get(request_id)
        if wait is None or not wait.came:
            return 0
        came, first = np.unique(np.concatenate(wait.came)), start // self._size
        end = first + num_loaded // self._size
        return int(np.count_nonzero((came >= first) & (came < end))) * self._size

    def forget(self, request_id: str) -> None:
        """The turn is over, or its client went away: it waits for no read any more."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._leave(wait)

    # --- what happens besides ---------------------------------------------------------
    def settled(self, transfer: Transfer) -> None:
        """A read is over. What it brought, before a bad slot ended it, can be found in DRAM, marked
        as on disk as well."""
        read = self._reads.pop(transfer.id)
        numbers = numbers_of(read.tickets)
        self.num_blocks -= len(numbers)
        for number in numbers.tolist():
            del self._read_to[number]
        is_here = np.repeat(transfer.copied(), self._plan.slot_blocks)[transfer.slots >= 0]
        here = read.tickets[is_here]
        self._marks.save(here[self._dram.are_there(here)])
        self._dram.settle(here, stored=True)
        self._dram.settle(read.tickets[~is_here], stored=False)
        if self._events is not None:
            self._events.stored(transfer.id, set(self._dram.keys_of(read.tickets)))
        for wait in read.waits:
            if is_here.any():
                wait.came.append(read.places[is_here])
            if transfer.state is not TransferState.DONE:
                wait.told.why = wait.told.why or "failed"

    def new_step(self) -> None:
        """Turns that wait for room may try again."""
        self._num_tries = 0

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
    def _replace_wait(self, request_id: str, wait: Wait) -> None:
        """The turn waits for this, no more for what it waited for before."""
        before = self._waits.pop(request_id, None)
        if before is not None:
            wait.came = before.came
            self._leave(before)
        if wait.reads or wait.rest is not None or wait.came:
            self._waits[request_id] = wait

    def _go_on(self, wait: Wait, wanted: Wanted, now: float) -> None:
        """Read on if there is room by now: where one turn found none, no other does."""
        is_full = self._stand == self._full and wait.lacks not in self._dram
        if is_full or self._num_tries >= TRIES_PER_STEP:
            return
        self._num_tries += 1
        prompt = Prompt.look(wanted, self._dram, self._disk.find(wanted.names))
        wait.rest = None
        depths = prompt.missing(self._plan.slot_blocks)
        reads = self._into(prompt.in_dram[wanted.start :])
        if len(depths):
            reads += self._begin(wait, prompt, depths, now)
        self._join(wait, reads, wanted)

    @property
    def _stand(self) -> tuple[int, ...]:
        """Changes whenever DRAM may have more room."""
        traffic = self._traffic
        copies = traffic.num_of(Kind.STORE), traffic.num_of(Kind.WRITE)
        return self._dram.version, *copies, int(self._has_new())

    def _makes_room(self, now: float) -> bool:
        """Whether blocks of DRAM are on their way to the disk, and may leave soon."""
        return self._takes_all(now) and any(self._stand[1:])

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
            told.read_s = costs.read_s(self.num_blocks + num) + costs.load_s(num_loaded)
            told.why = "" if told.read_s < told.prefill_s else "prefill"
        return told, 2 * prefill_s

    def _begin(self, wait: Wait | None, prompt: Prompt, depths: Numbers, now: float) -> list[Read]:
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
        ends = [(place + 1) * self._size for place in chain]
        rank = self._rank_now(now)
        tickets = self._dram.reserve(keys, program, now, rank, ends=ends, is_ahead=can_wait)
        self._account.count("dram_evicted_blocks", self._dram.num_evicted - num_evicted)
        targets = np.full(end, -1, np.int64)
        targets[is_wanted.nonzero()[0][: len(tickets)]] = tickets
        has_room = (targets.reshape(-1, length)[depths] >= 0).any(axis=1)
        if wait is not None and can_wait and not has_room.all():
            lacks = int((is_wanted & (targets < 0)).argmax())
            wait.rest, wait.lacks, self._full = wanted, wanted.keys[lacks], self._stand
        elif wait is not None and not has_room.all():
            wait.told.why = "room"
        return self._queue_reads(prompt, depths[has_room], targets, now)

    # --- reads under way --------------------------------------------------------------
    def _into(self, numbers: Numbers) -> list[Read]:
        """The reads into these slots of DRAM."""
        if not self._read_to:
            return []
        found = (self._read_to.get(number) for number in numbers.tolist())
        return list(dict.fromkeys(read for read in found if read is not None))

    def _queue_reads(
        self, prompt: Prompt, depths: Numbers, targets: Tickets, now: float
    ) -> list[Read]:
        """Queue reads of these disk slots, given by their places in the chain, in its order.
        `targets`: the slot of DRAM for each block of the chain, -1 if it is not to be read."""
        step = max(1, self.max_read_bytes // (self._plan.slot_blocks * self._plan.block_bytes))
        parts = (depths[first : first + step] for first in range(0, len(depths), step))
        return [self._queue_read(prompt, part, targets, now) for part in parts]

    def _join(self, wait: Wait, reads: Sequence[Read], wanted: Wanted) -> None:
        """Let a turn wait for these reads."""
        for read in reads:
            read.waits.append(wait)
            if self._events is not None and len(read.waits) == 1:
                places = read.places.tolist()
                ends = [(place + 1) * self._size for place in places]
                named = [wanted.keys[place] for place in places]
                self._events.describe(read.transfer.id, wanted.request, named, ends)
        wait.reads = list(reads)[::-1]

    def _leave(self, wait: Wait) -> None:
        """The turn waits no more. What no turn waits for and has not begun is not read."""
        reads, wait.reads, wait.rest = wait.reads, [], None
        for read in reads:
            if read.transfer.id in self._reads:
                read.waits.remove(wait)
                if not read.waits:
                    self._dram.disown(read.tickets)
                    self._traffic.cancel(read.transfer)

    def _queue_read(self, prompt: Prompt, depths: Numbers, targets: Tickets, now: float) -> Read:
        wanted, length, numbers = prompt.wanted, self._plan.slot_blocks, prompt.on_disk[depths]
        places = (depths[:, None] * length + np.arange(length)).ravel()
        names = [wanted.names[depth] for depth in depths.tolist()]
        self._disk.acquire(numbers)
        self.began = now
        what = Kind.READ, wanted.program, numbers.astype(np.int32), targets[places]
        named = names, depths.tolist(), self.num_blocks
        transfer = self._traffic.below(self._owner, *what, now, *named)
        self.num_blocks += len(transfer)
        places = places[transfer.slots >= 0]
        read = self._reads[transfer.id] = Read(transfer, targets[places], places)
        self._read_to.update(dict.fromkeys(numbers_of(read.tickets).tolist(), read))
        return read


class Wanted(NamedTuple):
    """Keys of a prompt's blocks, names of its disk slots. VRAM has the first `start` blocks."""

    program: str
    request: Any
    keys: list[Key]
    names: list[Key]
    start: int


@dataclass(frozen=True)
class Prompt:
    """Where what is wanted lies: each block's slot in DRAM, each disk slot's number, -1 where there
    is none. `is_there`: whether the block is in DRAM or VRAM."""

    wanted: Wanted
    in_dram: Numbers
    is_there: npt.NDArray[np.bool_]
    on_disk: Numbers

    @classmethod
    def look(cls, wanted: Wanted, dram: HostIndex, on_disk: Numbers) -> Prompt:
        """Look up what DRAM has now. `on_disk`: the number of each disk slot, -1 if it is not
        there."""
        in_dram = dram.slots_of(wanted.keys)
        is_there = in_dram >= 0
        is_there[: wanted.start] = True
        return cls(wanted, in_dram, is_there, on_disk)

    def missing(self, length: int) -> Numbers:
        """The depths of the disk slots that a hit needs beside what is there, up to the first that
        is not on disk. A depth is a place in the chain, counted in disk slots of `length` blocks.
        """
        is_whole = np.asarray(self.is_there.reshape(-1, length).all(axis=1))
        ends = (~is_whole & (self.on_disk < 0)).nonzero()[0]
        end = int(ends[0]) if len(ends) else len(is_whole)
        depths: Numbers = (~is_whole[:end]).nonzero()[0]
        return depths

    def nowhere(self, length: int) -> set[Key]:
        """The blocks that must be computed: neither in VRAM or DRAM nor on disk."""
        are_gone = ~self.is_there & np.repeat(self.on_disk < 0, length)
        return {self.wanted.keys[place] for place in are_gone.nonzero()[0].tolist()}

    def gained(self, depths: Numbers, length: int) -> tuple[int, int]:
        """How many blocks need not be computed once all that is missing is there, and how many
        blocks before them are there already."""
        if not len(depths):
            return len(self.wanted.keys) - self.wanted.start, self.wanted.start
        first, end = int(depths[0]) * length, (int(depths[-1]) + 1) * length
        first += int((~self.is_there[first:end]).argmax())
        return end - first, first

    def copied(self, depths: Numbers, length: int) -> tuple[int, int]:
        """How many blocks are read from these disk slots, and about how many are loaded then."""
        num_read = np.count_nonzero(~self.is_there.reshape(-1, length)[depths])
        return int(num_read), int(depths[-1] + 1 - depths[0]) * length
