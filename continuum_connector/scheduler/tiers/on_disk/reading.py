"""Reading: brings to DRAM what a turn wants from the disk, while the turn waits in the queue.

Reads begin when the turn arrives, in the order of its chain, if they and the load take less time
than a new prefill. A turn about to be admitted while its reads are under way waits for them, before
it has a block of VRAM, until a deadline, and then never again: what is in DRAM is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.tiers.eviction import Rank, least
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.on_disk.index import DiskIndex
from continuum_connector.scheduler.tiers.on_disk.under_way import Read, UnderWay, Wait
from continuum_connector.scheduler.tiers.on_disk.wanted import (
    CopyCosts,
    OnDisk,
    Prompt,
    Wanted,
    block_keys,
)
from continuum_connector.scheduler.tiers.slots import Numbers
from continuum_connector.scheduler.tiers.traffic import Owner, Traffic
from continuum_connector.scheduler.tiers.transfers import Kind

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
        self._waits: dict[str, Wait] = {}
        self.under_way = UnderWay(plan.slot_blocks, plan.block_bytes, dram, disk, traffic)
        self._full: tuple[int, ...] = ()  # `_stand` when a turn last found no room
        self._num_tries = 0  # to read on, in this step
        self.has_waiting: Callable[[str], bool] = lambda program: False  # has a waiting turn
        self.has_new: Callable[[], bool] = lambda: False  # blocks to write at once
        self.owner: Owner | None = None
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
        now: float,
    ) -> OnDisk | None:
        """A turn has arrived, or is about to be admitted: begin to read what it will want, if that
        is worth it, beside what is being read for it already. `num_vram_tokens`: what VRAM seems to
        have of it. `num_turns`: turns under way, which a prefill delays. Returns what the disk has
        of it; None if it has nothing of use."""
        length, hashes = self._plan.slot_blocks, request.block_hashes
        num_disk_slots = min(len(hashes), request.num_tokens // self._size) // length
        if num_disk_slots and (self.owner is None or self.is_stuck):
            return OnDisk(why="down" if self.owner is None else "stuck")
        lost, why_lost = (b"", "") if self._dram.marks is None else self._dram.marks.lost(program)
        if not num_disk_slots or not (self._disk.num_ready or lost):
            return None
        names = block_keys(hashes[length - 1 : num_disk_slots * length : length])
        on_disk = self._disk.find(names)
        if (on_disk < 0).all() and not lost:
            return None
        self._disk.shelves.use(program, on_disk[on_disk >= 0])
        keys, start = block_keys(hashes[: num_disk_slots * length]), num_vram_tokens // self._size
        wanted = Wanted(program, request, keys, names, start)
        prompt = Prompt.look(wanted, self._dram, on_disk)
        depths = prompt.missing(length)
        told, patience_s = self._weigh(prompt, depths, max(1, num_turns))
        wait = Wait(now + min(self._plan.timeout_s, patience_s), told)
        reads = self.under_way.into(prompt.in_dram[start:])
        if len(depths) and not told.why:
            reads += self._begin(wait, prompt, depths, now)
        elif len(depths) and now - self.under_way.began >= PROBE_S:
            self._begin(None, prompt, depths[:1], now)  # only to see how fast it is by now
        self.under_way.join(wait, reads, wanted, self._size)
        self._replace_wait(request.request_id, wait)
        if lost and lost in prompt.nowhere(length):
            told.why = told.why or why_lost
        return told if told.num_tokens or wait.reads or told.why else None

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether the turn is to wait for its reads; once it is not, it never is again."""
        wait = self._waits.get(request_id)
        if wait is None:
            return False
        while wait.reads and wait.reads[-1] not in self.under_way:
            wait.reads.pop()
        if not wait.reads and wait.rest is not None and now < wait.deadline:
            self._go_on(wait, wait.rest, now)
        if (wait.reads or wait.rest is not None) and now < wait.deadline:
            return True
        if wait.rest is not None:
            wait.told.why = "room"
        elif wait.reads:
            wait.told.why = "deadline"
        self.under_way.leave(wait)
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
            self.under_way.leave(wait)

    # --- what happens besides ---------------------------------------------------------
    def new_step(self) -> None:
        """Turns that wait for room may try again."""
        self._num_tries = 0

    def clear(self) -> None:
        """What is being read is no longer wanted."""
        self.under_way.disown()
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
            self.under_way.leave(before)
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
        reads = self.under_way.into(prompt.in_dram[wanted.start :])
        if len(depths):
            reads += self._begin(wait, prompt, depths, now)
        self.under_way.join(wait, reads, wanted, self._size)

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
            told.read_s = costs.read_s(self.under_way.num_blocks + num) + costs.load_s(num_loaded)
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
        rank = self.rank_at(now)
        rank = least(program, rank) if can_wait else rank
        tickets = self._dram.reserve(keys, program, now, rank, places=chain)
        self._account.count("dram_evicted_blocks", self._dram.num_evicted - num_evicted)
        targets = np.full(end, -1, np.int64)
        targets[is_wanted.nonzero()[0][: len(tickets)]] = tickets
        has_room = (targets.reshape(-1, length)[depths] >= 0).any(axis=1)
        if wait is not None and can_wait and not has_room.all():
            lacks = int((is_wanted & (targets < 0)).argmax())
            wait.rest, wait.lacks, self._full = wanted, wanted.keys[lacks], self._stand
        elif wait is not None and not has_room.all():
            wait.told.why = "room"
        assert self.owner is not None
        return self.under_way.begin(self.owner, prompt, depths[has_room], targets, now)
