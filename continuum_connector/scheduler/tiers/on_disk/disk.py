"""DiskTier: host memory whose overflow is kept on a disk (base.py, Tier).

The disk exchanges blocks with DRAM alone. What would leave DRAM next is written before it does, and
a turn's blocks are read back into DRAM, from where a load brings them to VRAM as usual. Any failure
of the disk ends as a miss, and a disk that is down leaves DRAM as it is.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from continuum_connector.messages import WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import ChainBlocks, KvGroups
from continuum_connector.scheduler.tiers.base import RankAt
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.eviction import Rank
from continuum_connector.scheduler.tiers.on_disk.index import DiskIndex, Found
from continuum_connector.scheduler.tiers.on_disk.marks import Marks
from continuum_connector.scheduler.tiers.on_disk.reading import DiskPlan, Reading
from continuum_connector.scheduler.tiers.on_disk.saving import Saving
from continuum_connector.scheduler.tiers.on_disk.writing import Attempts, Budget, Depth, Failures
from continuum_connector.scheduler.tiers.slots import Tickets
from continuum_connector.scheduler.tiers.traffic import Owner
from continuum_connector.scheduler.tiers.transfers import (
    DiskPlaces,
    Kind,
    Transfer,
    TransferState,
)

logger = logging.getLogger(f"vllm.{__name__}")

# How often an idle engine asks whether the disks are open, and what a restart found there.
OPENING_LOOK_S, SCAN_LOOK_S = 0.25, 0.02
SAVE_LOOK_S = 0.1  # how often an idle engine goes on to write what no request asks for
NEW_LOOK_S = 0.02  # and to write what has just come to DRAM
MAX_WRITE_BYTES = 64 << 20  # of one order, on a rank
MAX_BUSY = 2  # one in so many DRAM slots at most is being written: a disk that hangs keeps those
# So many reads with wrong bytes, or so many I/O errors, within an hour end a disk's life (a power
# cut alone tears as many slots as were being written). Refused writes end only its writing.
MAX_CORRUPT, MAX_EIO = 16, 3
NOT_BEGUN = frozenset({"stale", "asleep", "no_tier"})
# Reasons why a copy failed that may succeed the next time.
PASSING = NOT_BEGUN | {"cancelled", "closed"}


class DiskTier:
    """DRAM and a disk as one. The disk is used once every rank has said how large its part is."""

    names: Sequence[str] = ("dram", "disk")

    def __init__(self, dram: DramTier, plan: DiskPlan, groups: KvGroups, account: Account) -> None:
        self.dram = dram
        self.traffic = dram.traffic
        self.store, self.residence_s = dram.store, dram.residence_s
        self.loans = dram.loans
        self.disk = DiskIndex()
        self._plan = plan
        self._account = account
        self._pasts = dram.index.past, self.disk.past
        marks = dram.index.marks = Marks(dram.index.num_slots, plan.slot_blocks)
        marks.passes_on, marks.stays, self._marks = self._passes_on, self._stays, marks
        marks.key_of = lambda number: dram.index.keys_at(np.array([number]))[0]
        disk_bytes = plan.slot_blocks * plan.block_bytes * self.traffic.world_size
        self._budget = Budget(plan.write_budget, disk_bytes)
        length = plan.slot_blocks
        self._saving = Saving(dram.index, marks, self.disk, length, self._budget, account)
        self.ahead = Reading(plan, dram.index, self.disk, groups, self.traffic, account)
        self.ahead.rank_at = self._rank_now
        self.ahead.has_new = lambda: self._saving.has_new and self._is_scanned
        self._owner = Owner(self._settled, self._go_down, of_disk=True)
        self._found = Found(self.traffic.world_size)
        self._disk_bytes, self._block_tokens = disk_bytes, groups.hash_size
        self._disk_slots: dict[int, int] = {}  # rank -> how many it has
        self._disk_down = ""
        self._num_unsaved = 0
        self._most = max(1, MAX_WRITE_BYTES // (length * plan.block_bytes))  # disk slots per order
        self._attempts, self._depth = Attempts(), Depth(self._most)
        self._errors, self._corrupt = Failures(), Failures()
        self._now = -math.inf  # of the last step
        self._scanned: set[int] = set()  # ranks that have told all that a restart found
        dram.doubts, dram.came, dram.went_down = self._doubt, self._came, self._leave
        self._events = self.ahead.under_way.events = dram.events
        if dram.events is not None:
            self.disk.gone = deque()
        self.traffic.background = self._step
        self.traffic.look_every_s = OPENING_LOOK_S

    @property
    def is_up(self) -> bool:
        return self.dram.is_up

    @property
    def down_reason(self) -> str:
        return self.dram.down_reason or self._disk_down

    @property
    def rank_at(self) -> RankAt | None:
        return self.dram.rank_at

    @rank_at.setter
    def rank_at(self, rank_at: RankAt | None) -> None:
        self.dram.rank_at = rank_at

    @property
    def num_blocks(self) -> int:
        on_disk = self.disk.num_slots * self._plan.slot_blocks if self._has_disk else 0
        return max(self.dram.num_blocks, on_disk) if self.dram.is_up else 0

    # --- as DRAM does it --------------------------------------------------------------
    def find(self, request: Any, num_vram_tokens: int) -> int:
        self.ahead.looked(request.request_id, num_vram_tokens)
        return self.dram.find(request, num_vram_tokens)

    def load(
        self,
        program: str,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        now: float,
    ) -> Mapping[str, int]:
        self.dram.load(program, request, block_ids, num_tokens, now)
        of_disk = self.ahead.num_tokens(request.request_id, num_tokens)
        return {"dram": num_tokens - of_disk, "disk": of_disk}

    def forget_request(self, request_id: str) -> None:
        self.ahead.forget(request_id)
        self.dram.forget_request(request_id)

    def demote(self, program: str, blocks: ChainBlocks | None, request: Any = None) -> None:
        self.dram.demote(program, blocks, request)
        length = self._plan.slot_blocks
        names = None if blocks is None else blocks.keys[length - 1 :: length]
        self.disk.demote(program, names)

    def take_events(self) -> list[Any]:
        if self._events is not None and self.disk.gone:
            self._events.left_disk(list(self.disk.gone))
            self.disk.gone.clear()
        return self.dram.take_events()

    # --- all of it --------------------------------------------------------------------
    def reset(self, now: float) -> list[Transfer]:
        over = self.traffic.abandon(self._owner, resets_disk=True)
        self._forget_all()
        self._found.close()
        return over + self.dram.reset(now)

    def hear(self, report: WorkerReport) -> None:
        self.dram.hear(report)
        self._scanned |= report.disk_scanned
        if self._has_disk:  # a store that settles now may be the last event for a while
            self.traffic.look_every_s = min(SAVE_LOOK_S, self.traffic.look_every_s)
        if report.disk_down:
            self._go_down(report.disk_down)
        if report.disk_slots and self.dram.is_up and not self._disk_down:
            self._disk_slots |= report.disk_slots
            if len(self._disk_slots) == self.traffic.world_size:
                self.disk.grow(min(self._disk_slots.values()))
                self.ahead.owner = self._owner
        found = self._found.on_all(report.found)  # also for a rank that is ahead of others
        if found and self._has_disk:
            self.disk.found(found)
        for spent in report.disk_spent.values():  # the most of what ranks know
            self._budget.restore(spent.num_bytes, spent.age_s)

    def update_gauges(self) -> None:
        self.dram.update_gauges()
        account, disk, length = self._account, self.disk, self._plan.slot_blocks
        account.gauge("disk_up", float(self._has_disk))
        account.gauge("disk_writable", float(self._has_disk and not self._attempts.is_over))
        account.gauge("disk_capacity_blocks", disk.num_slots * length if self._has_disk else 0)
        account.gauge("disk_blocks", disk.num_ready * length, "ready")
        account.gauge("disk_blocks", disk.num_writing * length, "writing")
        num_used = disk.num_ready + disk.num_writing
        account.gauge("disk_oldest_op_seconds", self.traffic.oldest_of_disk_s)
        account.gauge("disk_used_bytes", num_used * self._disk_bytes)
        account.count("disk_unsaved_blocks", self._marks.num_unsaved - self._num_unsaved)
        self._num_unsaved = self._marks.num_unsaved

    # --- parts ------------------------------------------------------------------------
    @property
    def _has_disk(self) -> bool:
        return self.ahead.owner is not None

    @property
    def _is_scanned(self) -> bool:
        """Whether all is known that a restart found: before, it would be written once more."""
        return len(self._scanned) == self.traffic.world_size

    def _passes_on(self, now: float) -> bool:
        """Whether what comes to DRAM is written to disk whatever it is worth, because that pays:
        there is budget to spare, and a read takes less time than the prefill it saves."""
        takes = self._has_disk and not self._attempts.is_over and not self.ahead.is_stuck
        if not (takes and self._saving.has_spare(now)):
            return False
        costs, num = self._plan.costs, 1000
        read_s, prefill_s = costs.read_s(num) / num, costs.prefill_s(num) / num * self._block_tokens
        return not costs.knows_prefill or read_s < prefill_s

    def _stays(self, program: str, worth: float, num_blocks: int) -> bool:
        """Whether these blocks are needed sooner than they could be read back: at once, if a turn
        of the program waits."""
        return self.ahead.has_waiting(program) or -worth < self._plan.costs.read_s(num_blocks)

    def _rank_now(self, now: float) -> Rank | None:
        return None if self.rank_at is None else self.rank_at(now)

    def _step(self, now: float) -> None:
        """Do what no request asks for: follow the ranks' disks, write what leaves DRAM next, take
        apart what earlier epochs left."""
        for past in self._pasts:
            past.tidy()
        self.ahead.new_step()
        self._now = now
        if self._has_disk and not self._is_scanned:
            self.traffic.look_every_s = SCAN_LOOK_S
        elif self._has_disk:
            self._account.gauge("disk_budget_fill", self._budget.fill(now))
            num = self.traffic.num_of(Kind.WRITE)
            takes = self._attempts.may_begin(now, num) and not self.ahead.is_stuck
            most = 1 if self._attempts.is_over else self._depth.most(num)
            for _ in range(most - num if takes else 0):
                if not self._write(now) and not self._saving.goes_on:
                    break
            if self.traffic.num_of(Kind.WRITE) > num:
                self.traffic.disk_spent = self._budget.to_keep(now)
            self._depth.begun(self.traffic.num_of(Kind.WRITE))
            goes_on = takes and self._saving.goes_on
            self.traffic.look_every_s = SAVE_LOOK_S if goes_on else math.inf

    def _came(self, program: str) -> None:
        """Some blocks of the program were stored."""
        if self._has_disk:
            self._saving.came(program)
            self.traffic.look_every_s = NEW_LOOK_S

    def _write(self, now: float) -> bool:
        """Begin to write what is next. False: there is nothing to write, or not now."""
        length, num_writing = self._plan.slot_blocks, self.disk.num_writing
        room = min(self.dram.index.num_slots // MAX_BUSY // length, self._depth.num_slots)
        most = min(self._most, max(room - num_writing, not num_writing))
        batch = self._saving.next(most, self._rank_now(now), now) if most else None
        if batch is None:
            return False
        numbers = self.disk.reserve(batch.program, batch.keys, batch.depths)
        if not (num := len(numbers)):
            return False
        self._budget.take(num * self._disk_bytes)
        tickets = self.dram.index.acquire(batch.tickets[: num * length])
        keys, depths = batch.keys[:num], batch.depths[:num]
        places = DiskPlaces(numbers.astype(np.int32), keys, depths)
        self.traffic.of_disk(self._owner, Kind.WRITE, batch.program, places, tickets, now)
        return True

    def _settled(self, transfer: Transfer) -> None:
        numbers = transfer.blocks.astype(np.int64)
        assert transfer.outcome is not None
        reasons = set(transfer.outcome.reasons)
        if transfer.kind is Kind.READ:
            self.ahead.under_way.settled(transfer)
            is_bad, is_wrong = transfer.bad("eio"), transfer.bad("corrupt", "missing")
            self.disk.release(numbers[is_bad], forget=True, is_bad=True)
            self.disk.release(numbers[is_wrong & ~is_bad], forget=True)
            self.disk.release(numbers[~is_wrong & ~is_bad])
        else:
            self._written(transfer, numbers, reasons)
        self._judge(reasons, transfer)

    def _written(self, transfer: Transfer, numbers: Any, reasons: set[str]) -> None:
        """Blocks that DRAM forgot meanwhile, as a load found them wrong, must not be found on disk.
        Slots that a rank calls stale hold nothing, and would be written from again and again."""
        index, tickets = self.dram.index, transfer.slots
        is_done = transfer.state is TransferState.DONE
        are_there = index.are_there(tickets)
        index.release(tickets, corrupt="stale" in reasons)
        if reasons and reasons <= NOT_BEGUN:
            self._budget.take(-len(numbers) * self._disk_bytes)
        is_late = transfer.cancelled and transfer.state is TransferState.FAILED
        if is_done or is_late:
            self._depth.ended(len(numbers), transfer.admitted, self._now, is_late)
        if is_done and self._attempts.succeed(transfer.admitted):
            logger.warning("The disk takes writes again")
        is_right = are_there.reshape(len(numbers), -1).all(axis=1) & transfer.copied()
        if is_right.any():
            tickets = tickets[np.repeat(is_right, self._plan.slot_blocks)]
            names = [transfer.keys[place] for place in is_right.nonzero()[0].tolist()]
            self._marks.save(tickets)
            if self._plan.slot_blocks > 1:
                self._marks.name(tickets, names)
            self.disk.settle(numbers[is_right], written=True)
            if self._events is not None:
                self._events.written(names)
        is_bad = transfer.bad("eio") & ~is_right
        self.disk.settle(numbers[is_bad], written=False, is_bad=True)
        self.disk.settle(numbers[~is_right & ~is_bad], written=False)

    def _doubt(self, tickets: Tickets) -> None:
        """A load found these slots wrong in DRAM: what was written from them is as wrong."""
        names = {*self.dram.index.keys_of(tickets), *self._marks.names_of(tickets)}
        numbers = self.disk.find(list(names))
        self.disk.forget(numbers[numbers >= 0])

    def _judge(self, reasons: set[str], transfer: Transfer) -> None:
        now = transfer.admitted  # off by seconds, which is little in an hour
        if self._disk_down:
            return
        is_lost = transfer.kind is Kind.WRITE and reasons - PASSING - {"eio"}  # eio: counted below
        if is_lost and self._attempts.fail(now, self._now):
            why = "is full, or may only be read" if "enospc" in reasons else "takes no writes"
            told = "; what is on it is read, and a write is tried every 10 minutes"
            logger.warning("The disk %s (%s)%s", why, ", ".join(sorted(reasons)), told)
        if "eio" in reasons and self._errors.add(now, self._now) >= MAX_EIO:
            self._go_down(f"the disk failed {MAX_EIO} times within an hour (input/output error)")
        is_wrong = transfer.kind is Kind.READ and "corrupt" in reasons
        if is_wrong and self._corrupt.note(now) >= MAX_CORRUPT:
            self._go_down(f"{MAX_CORRUPT} reads within an hour brought other bytes than written")

    def _go_down(self, reason: str) -> None:
        if self._disk_down:
            return
        self._disk_down = reason
        if self.dram.is_up:  # otherwise it went down with DRAM, which has said so
            mend = "DRAM goes on. Restart the server once it is mended"
            logger.warning("No disk tier: %s; %s", reason, mend)
        self._leave()

    def _leave(self) -> None:
        """Read and write nothing from now on."""
        self.traffic.look_every_s = math.inf
        if self._has_disk:
            self.ahead.owner = None
            if self._events is not None:  # now: an idle engine takes nothing apart
                self._events.left_disk([*(self.disk.gone or ()), *self.disk])
                self.disk.gone = None
            self._forget_all()
            self.traffic.abandon(self._owner)

    def _forget_all(self) -> None:
        for each in (self.ahead, self._saving, self._marks, self.disk):
            each.clear()
