"""Disk: keeps on a disk what leaves DRAM (base.py, Below).

What would leave DRAM next is written before it does, and a turn's blocks are read back into DRAM.
Any failure of the disk ends as a miss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from continuum_connector.messages import WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Key, KvGroups, Numbers
from continuum_connector.scheduler.tiers.base import RankAt, TierEvents
from continuum_connector.scheduler.tiers.disk_index import DiskIndex, Found, Marks
from continuum_connector.scheduler.tiers.disk_reading import DiskPlan, Reading
from continuum_connector.scheduler.tiers.disk_saving import (
    Attempts,
    Budget,
    Depth,
    Failures,
    Saving,
)
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Rank, Tickets
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
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


class Disk:
    """One disk per rank, used once every rank has said how large its part is. The blocks in a slot
    are the same on all."""

    names: Sequence[str] = ("disk",)
    brings_up = True

    def __init__(
        self,
        dram: HostIndex,
        plan: DiskPlan,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
        events: TierEvents | None,
        rank_at: RankAt | None,
        has_waiting: Callable[[str], bool],
    ) -> None:
        """`dram`: the slots above it; `rank_at`: the worth of chains there; `has_waiting`: whether
        a turn of that program waits."""
        self._dram = dram
        self._plan = plan
        self._traffic = traffic
        self._account = account
        self._events = events
        self._rank_at = rank_at
        self._has_waiting = has_waiting
        self._owner = Owner(self._settled, self._go_down, below="disk")
        self._disk_bytes = plan.slot_blocks * plan.block_bytes * traffic.world_size
        self._block_tokens = groups.hash_size
        self.index = DiskIndex(tells=events is not None)
        self.marks = Marks(dram.keys_at, plan.slot_blocks, groups.hash_size)
        self._budget = Budget(plan.write_budget, self._disk_bytes)
        self.saving = Saving(dram, self.marks, self.index, plan.slot_blocks, self._budget, account)
        self.reading = Reading(
            *(plan, dram, self.marks, self.index, groups, traffic, account),
            *(self._owner, events, self._rank_now),
            has_new=lambda: self.saving.has_new and self._is_scanned,
            takes_all=self.takes_all,
        )
        marks, reading = self.marks, self.reading  # which are asked themselves, for speed
        self.grow, self.came, self.used, self.left = marks.grow, marks.came, marks.used, marks.left
        self.are_kept, self.demote_all = marks.are_saved, self.index.shelves.demote_all
        self.bring_up, self.awaits, self.forget = reading.bring_up, reading.awaits, reading.forget
        self._found = Found(traffic.world_size)
        self._num_slots: dict[int, int] = {}  # rank -> how many it has
        self.down_reason = ""
        self._num_unsaved = 0
        # Disk slots of the largest order.
        self._most = max(1, MAX_WRITE_BYTES // (plan.slot_blocks * plan.block_bytes))
        self._attempts, self._depth = Attempts(), Depth(self._most)
        self._errors, self._corrupt = Failures(), Failures()
        self._now = -math.inf  # of the last step
        self._scanned: set[int] = set()  # ranks that have told all that a restart found
        self.look_every_s = OPENING_LOOK_S

    @property
    def num_blocks(self) -> int:
        return self.index.num_slots * self._plan.slot_blocks if self.index.is_open else 0

    # --- the slots of DRAM ------------------------------------------------------------
    def uses(self, slots: Numbers) -> list[int]:
        return list(self.marks.uses[slots].tolist())

    def takes_all(self, now: float) -> bool:
        """There is budget to spare, and a read takes less time than the prefill it saves."""
        takes = self.index.is_open and not self._attempts.is_over and not self.reading.is_stuck
        if not (takes and self.saving.has_spare(now)):
            return False
        costs, num = self._plan.costs, 1000
        read_s, prefill_s = costs.read_s(num) / num, costs.prefill_s(num) / num * self._block_tokens
        return not costs.knows_prefill or read_s < prefill_s

    def stays(self, program: str, worth: float, tail: Numbers, num: int) -> bool:
        """They are needed at once if a turn of the program waits. A disk that takes in what DRAM
        holds may lose them before they are needed: then they would be nowhere."""
        if not self.marks.is_saved[tail].any() or self._has_waiting(program):
            return True
        if -worth < self._plan.costs.read_s(num):
            return True
        return not self.index.outlasts(program, self._dram.num_slots // self._plan.slot_blocks)

    # --- what DRAM has and does -------------------------------------------------------
    def stored(self, program: str) -> None:
        if self.index.is_open:
            self.saving.came(program)
            self.look_every_s = NEW_LOOK_S

    def doubted(self, tickets: Tickets) -> None:
        names = {*self._dram.keys_of(tickets), *self.marks.names_of(tickets)}
        numbers = self.index.find(list(names))
        self.index.forget(numbers[numbers >= 0])

    def demote(self, program: str, keys: Sequence[Key | None]) -> None:
        length = self._plan.slot_blocks
        self.index.demote(program, keys[length - 1 :: length])

    def dram_down(self) -> None:
        self.down_reason = self.down_reason or "there is no DRAM above it"
        self._leave()

    def came_up(self, request_id: str, start: int, num_tokens: int) -> Mapping[str, int]:
        return {"disk": self.reading.num_tokens(request_id, start, num_tokens)}

    # --- steps ------------------------------------------------------------------------
    def reset(self) -> list[Transfer]:
        self._traffic.say(resets_disk=True)
        over = self._traffic.abandon(self._owner)
        self._forget_all()
        self._found.close()
        return over

    def step(self, now: float) -> None:
        """Follow the ranks' disks, write what leaves DRAM next, take apart what earlier epochs
        left."""
        self.index.past.tidy()
        self.reading.new_step()
        self._now = now
        if self.index.is_open and not self._is_scanned:
            self.look_every_s = SCAN_LOOK_S
        elif self.index.is_open:
            self._account.gauge("disk_budget_fill", self._budget.fill(now))
            num = self._traffic.num_of(Kind.WRITE)
            takes = self._attempts.may_begin(now, num) and not self.reading.is_stuck
            most = 1 if self._attempts.is_over else self._depth.most(num)
            for _ in range(most - num if takes else 0):
                if not self._write(now) and not self.saving.goes_on:
                    break
            if self._traffic.num_of(Kind.WRITE) > num:
                spent = self._budget.to_keep(now)
                if spent is not None:
                    self._traffic.say(disk_spent=spent)
            self._depth.begun(self._traffic.num_of(Kind.WRITE))
            goes_on = takes and self.saving.goes_on
            self.look_every_s = SAVE_LOOK_S if goes_on else math.inf

    def hear(self, report: WorkerReport) -> None:
        self._scanned |= report.disk_scanned
        if self.index.is_open:  # a store that settles now may be the last event for a while
            self.look_every_s = min(SAVE_LOOK_S, self.look_every_s)
        if report.disk_down:
            self._go_down(report.disk_down)
        if report.disk_slots and not self.down_reason:
            self._num_slots |= report.disk_slots
            if len(self._num_slots) == self._traffic.world_size:
                self.index.grow(min(self._num_slots.values()))
        found = self._found.on_all(report.found)  # also for a rank that is ahead of others
        if found and self.index.is_open:
            self.index.found(found)
        for spent in report.disk_spent.values():  # the most of what ranks know
            self._budget.restore(spent.num_bytes, spent.age_s)

    def announce(self) -> None:
        if self._events is not None and (gone := self.index.take_gone()):
            self._events.left_below(gone)

    def update_gauges(self) -> None:
        account, disk, length = self._account, self.index, self._plan.slot_blocks
        account.gauge("disk_up", float(disk.is_open))
        account.gauge("disk_writable", float(disk.is_open and not self._attempts.is_over))
        account.gauge("disk_capacity_blocks", self.num_blocks)
        account.gauge("disk_blocks", disk.num_ready * length, "ready")
        account.gauge("disk_blocks", disk.num_writing * length, "writing")
        num_used = disk.num_ready + disk.num_writing
        account.gauge("disk_oldest_op_seconds", self._traffic.oldest_below_s)
        account.gauge("disk_used_bytes", num_used * self._disk_bytes)
        account.count("disk_unsaved_blocks", self.marks.num_unsaved - self._num_unsaved)
        self._num_unsaved = self.marks.num_unsaved

    # --- parts ------------------------------------------------------------------------
    @property
    def _is_scanned(self) -> bool:
        """Whether all is known that a restart found: before, it would be written once more."""
        return len(self._scanned) == self._traffic.world_size

    def _rank_now(self, now: float) -> Rank | None:
        return None if self._rank_at is None else self._rank_at(now)

    def _write(self, now: float) -> bool:
        """Begin to write what is next. False: there is nothing to write, or not now."""
        length, num_writing = self._plan.slot_blocks, self.index.num_writing
        room = min(self._dram.num_slots // MAX_BUSY // length, self._depth.num_slots)
        most = min(self._most, max(room - num_writing, not num_writing))
        batch = self.saving.next(most, self._rank_now(now), now) if most else None
        if batch is None:
            return False
        numbers = self.saving.place(batch)
        if not (num := len(numbers)):
            return False
        self._budget.take(num * self._disk_bytes)
        tickets = self._dram.acquire(batch.tickets[: num * length])
        what = Kind.WRITE, batch.program, numbers.astype(np.int32), tickets
        self._traffic.below(self._owner, *what, now, batch.keys[:num], batch.depths[:num])
        return True

    def _settled(self, transfer: Transfer) -> None:
        numbers = transfer.blocks.astype(np.int64)
        assert transfer.outcome is not None
        reasons = set(transfer.outcome.reasons)
        if transfer.kind is Kind.READ:
            self.reading.settled(transfer)
            is_bad, is_wrong = transfer.bad("eio"), transfer.bad("corrupt", "missing")
            self.index.release(numbers[is_bad], forget=True, is_bad=True)
            self.index.release(numbers[is_wrong & ~is_bad], forget=True)
            self.index.release(numbers[~is_wrong & ~is_bad])
        else:
            self._written(transfer, numbers, reasons)
        self._judge(reasons, transfer)

    def _written(self, transfer: Transfer, numbers: Any, reasons: set[str]) -> None:
        """Blocks that DRAM forgot meanwhile, as a load found them wrong, must not be found on disk.
        Slots that a rank calls stale hold nothing, and would be written from again and again."""
        tickets, is_done = transfer.slots, transfer.state is TransferState.DONE
        are_there = self._dram.are_there(tickets)
        self._dram.release(tickets, corrupt="stale" in reasons)
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
            self.marks.save(tickets)
            if self._plan.slot_blocks > 1:
                self.marks.name(tickets, names)
            self.index.settle(numbers[is_right], written=True)
            if self._events is not None:
                self._events.kept_below(names)
        is_bad = transfer.bad("eio") & ~is_right
        self.index.settle(numbers[is_bad], written=False, is_bad=True)
        self.index.settle(numbers[~is_right & ~is_bad], written=False)

    def _judge(self, reasons: set[str], transfer: Transfer) -> None:
        now = transfer.admitted  # off by seconds, which is little in an hour
        if self.down_reason:
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
        if self.down_reason:
            return
        self.down_reason = reason
        mend = "DRAM goes on. Restart the server once it is mended"
        logger.warning("No disk tier: %s; %s", reason, mend)
        self._leave()

    def _leave(self) -> None:
        """Read and write nothing from now on."""
        self.look_every_s = math.inf
        if self.index.is_open:
            gone = self.index.close()
            if self._events is not None:  # now: an idle engine takes nothing apart
                self._events.left_below(gone)
            self._forget_all()
            self._traffic.abandon(self._owner)

    def _forget_all(self) -> None:
        for each in (self.reading, self.saving, self.marks, self.index):
            each.clear()
