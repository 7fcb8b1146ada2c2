"""DramTier: stores finished turns to DRAM and loads them back, one transfer at a time each.

It owns the host index and the transfer ledger. Whatever goes wrong with a transfer ends
as a miss: the slots are forgotten and the tokens are computed again (law 4).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.holds import HoldTable
from continuum_connector.scheduler.kv_groups import ChainBlocks, KvGroups
from continuum_connector.scheduler.tiers.events import TierEvents
from continuum_connector.scheduler.tiers.finding import Finder
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.transfers import (
    Deadlines,
    Kind,
    Transfer,
    TransferLedger,
    TransferState,
)

# How often an engine that has nothing else to do looks whether a copy that hangs has ended.
LOOK_S = 1.0

logger = logging.getLogger(f"vllm.{__name__}")


class DramTier:
    """The scheduler's view of host memory. With no slots it holds nothing and finds nothing.

    Each rank is to have `num_slots`; a slot can be used once every rank has reported it.
    `rank` (program, now) is the worth of a program's blocks in DRAM, the lowest leave first; with
    None the least recently used do. It is asked for what is stored, too, which is used now.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        world_size: int,
        groups: KvGroups,
        holds: HoldTable,
        account: Account,
        load_timeout_s: float,
        events: TierEvents | None = None,
        rank: Callable[[str, float], float] | None = None,
    ) -> None:
        self.index = HostIndex(0)
        self.ledger = TransferLedger(world_size)
        self.is_up = num_slots > 0
        self.num_wanted_slots = num_slots
        self._world_size = world_size
        self._ready_slots: dict[int, int] = {}  # rank -> host slots it can use
        self.down_reason = ""
        self._slot_bytes = slot_bytes
        self._holds = holds
        self._account = account
        self._events = events
        self.rank = rank
        self._found = Finder(self.index, groups)
        self._deadlines = Deadlines(self.ledger, load_timeout_s)
        self._hangs = False
        self._looked = 0.0
        self._num_stores = 0
        account.gauge("dram_wanted_blocks", num_slots)
        account.gauge("tier_up", float(self.is_up))

    # --- stores -----------------------------------------------------------------------
    def store(
        self,
        program: str,
        blocks: ChainBlocks,
        now: float,
        request: Any = None,
        supersedes: bool = True,
    ) -> bool:
        """Queue a store of those `blocks` that are not in DRAM yet.

        Returns whether DRAM has most of them now, or will. They are held until the copy has
        settled, so the caller may let go of them at once. Room is made by evicting what is worth
        less; blocks for which there is no such room are not stored. `supersedes`: whether this is
        all that the program wants of what it stored, as when it has no other turn under way
        (HostIndex.reserve).
        """
        if not self.is_up:
            return False
        rank = self.rank
        rank_now = None if rank is None else lambda program: rank(program, now)
        evicted, refused = self.index.num_evicted, self.index.num_refused
        slots = self.index.reserve(blocks.keys, program, now, rank_now, supersedes)
        self._account.count("dram_evicted_blocks", self.index.num_evicted - evicted)
        refused = self.index.num_refused - refused
        self._account.count("dram_refused_blocks", refused)
        has_most = 2 * refused <= len(blocks)
        if not len(slots):
            return has_most
        if len(slots) < len(blocks):
            blocks = blocks.only(set(self.index.keys_of(slots)))
        hold = self._holds.take(blocks.blocks)
        transfer = self.ledger.store(program, hold, slots, now)
        self._deadlines.add(transfer)
        self._num_stores += 1
        if self._events is not None and request is not None:
            self._events.describe(transfer.id, request, blocks)
        self._admitted(transfer)
        return has_most

    # --- loads ------------------------------------------------------------------------
    def find(self, request: Any, num_vram_tokens: int) -> int:
        """Return how many tokens beyond `num_vram_tokens` a load could bring back."""
        if not self.is_up or not self.index.num_ready:
            return 0
        return self._found.find(request, num_vram_tokens)

    def load(
        self,
        program: str,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        now: float,
    ) -> Transfer:
        """Queue the load that `find` promised into the blocks vLLM allocated for it.

        `block_ids`: the request's blocks per group, null (0) outside windows.
        `num_tokens`: how many to load, from where VRAM's hit ended.
        """
        blocks, slots = self._found.take(request, block_ids, num_tokens)
        # vLLM waits for this load now. If a slot has gone since the promise, the load names
        # none, so that every rank refuses it, and it is recomputed.
        slots = np.full(len(blocks), -1) if slots is None else self.index.acquire(slots)
        transfer = self.ledger.load(program, request.request_id, blocks, slots, now)
        self.index.touch(program, now)
        self._deadlines.add(transfer)
        self._admitted(transfer)
        return transfer

    def forget_request(self, request_id: str) -> None:
        """The request is over; drop what was remembered for its lookups."""
        self._found.forget(request_id)

    # --- every step -------------------------------------------------------------------
    def drain(self, now: float) -> StepPlan:
        """Return this step's orders for the workers; cancels what takes too long.

        Where even that does not end a copy, later ones would wait behind it, so nothing more is
        promised. Its request goes on waiting: it would be computed in the blocks that the copy
        may yet write to (vLLM keeps those behind a prefix hit for it).
        """
        self._looked = now
        hung = self._deadlines.step(now)
        self._hangs |= hung is not None
        if hung is not None and self.is_up:
            self._go_down(
                f"{hung.kind.value} {hung.id} hangs: begun {now - hung.admitted:.0f} s ago, "
                "cancelled, and the driver has not ended it"
            )
            logger.warning("No DRAM tier: %s; restart the server", self.down_reason)
        return self.ledger.drain()

    @property
    def next_look(self) -> float:
        """From when on an otherwise idle engine must step for the copies in flight: it is by
        steps that workers report. Once one hangs, which may be for ever, only now and then."""
        if not len(self.ledger):
            return math.inf
        return self._looked + LOOK_S if self._hangs else -math.inf

    def settle(self, report: WorkerReport, now: float) -> list[Transfer]:
        """Take in what the workers report; returns the transfers that are over."""
        if report.tier_down and self.is_up:
            self._go_down(report.tier_down)
        if report.ready_slots:
            self._grow(report.ready_slots)
        settled = self.ledger.settle(report)
        for transfer in settled:
            if transfer.kind is Kind.STORE:
                self._store_settled(transfer)
            else:
                self._load_settled(transfer)
            self._count(transfer, now)
        return settled

    def oldest_store_age(self, now: float) -> float | None:
        """Seconds since the oldest store in flight was queued, or None if there is none."""
        held = (t for t in self.ledger if t.kind is Kind.STORE and t.hold)  # the oldest first
        oldest = next(held, None)
        return None if oldest is None else now - oldest.admitted

    def residence_s(self, now: float) -> float:
        """Seconds a stored block stays before it leaves for room; infinite while none has to."""
        return self.index.residence.seconds(now)

    def reset(self, now: float) -> list[Transfer]:
        """Forget every block, as after a weight update. Stores in flight are abandoned:
        their VRAM blocks are free at once, and what they write is thrown away.

        Returns the transfers that are over: stores that had not left yet.
        """
        settled = []
        for transfer in self.ledger:
            if transfer.kind is not Kind.STORE:
                continue
            self._release(transfer)
            if self.ledger.abandon(transfer):
                self._store_settled(transfer)
                self._count(transfer, now)
                settled.append(transfer)
        self.index.clear()  # what `find` remembers is then of an older version of it
        if self._events is not None:
            self._events.cleared()
        return settled

    def take_events(self) -> list[Any]:
        """Return vLLM KV events for blocks that came to DRAM or left it."""
        gone, self.index.gone = self.index.gone, deque()
        if self._events is None:
            return []
        self._events.removed(gone)
        return self._events.take()

    def update_ledger(self) -> None:
        self._account.gauge("transfers_in_flight", self._num_stores, "store")
        self._account.gauge("transfers_in_flight", len(self.ledger) - self._num_stores, "load")

    def update_gauges(self) -> None:
        account, index = self._account, self.index
        account.gauge("dram_capacity_blocks", index.num_slots if self.is_up else 0)
        account.gauge("dram_blocks", index.num_ready, "ready")
        account.gauge("dram_blocks", index.num_writing, "writing")
        account.gauge("dram_used_bytes", (index.num_slots - index.num_free) * self._slot_bytes)

    # --- parts ------------------------------------------------------------------------
    def _grow(self, ready_slots: dict[int, int]) -> None:
        """A block lies in the same slot on every rank, so the slowest rank sets the pace."""
        self._ready_slots |= ready_slots
        if len(self._ready_slots) == self._world_size:
            self.index.grow(min(self.num_wanted_slots, *self._ready_slots.values()))

    def _store_settled(self, transfer: Transfer) -> None:
        self.index.settle(transfer.slots, stored=transfer.state is TransferState.DONE)
        self._release(transfer)
        self._num_stores -= 1
        if self._events is not None:
            self._events.stored(transfer.id, set(self.index.keys_of(transfer.slots)))

    def _load_settled(self, transfer: Transfer) -> None:
        if transfer.slots[0] >= 0:
            self.index.release(transfer.slots, corrupt=transfer.state is TransferState.FAILED)

    def _release(self, transfer: Transfer) -> None:
        if transfer.hold is not None:
            self._holds.release(transfer.hold)
            transfer.hold = None

    def _go_down(self, reason: str) -> None:
        self.is_up = False
        self.down_reason = reason
        self.index.clear()
        self._account.gauge("tier_up", 0.0)

    def _admitted(self, transfer: Transfer) -> None:
        self._account.count("transfers_admitted", label=transfer.kind.value)

    def _count(self, transfer: Transfer, now: float) -> None:
        account, outcome = self._account, transfer.outcome
        assert outcome is not None
        name = "stores" if transfer.kind is Kind.STORE else "loads"
        verb = "stored" if transfer.kind is Kind.STORE else "loaded"
        is_late = transfer.cancelled and transfer.state is TransferState.FAILED
        is_cancelled = is_late and transfer.kind is Kind.LOAD
        account.count(name, label="cancelled" if is_cancelled else transfer.state.value)
        for reason in set(outcome.reasons):
            is_timeout = is_late and reason == "cancelled"
            account.count("transfer_failures", label="timeout" if is_timeout else reason)
        if transfer.state is TransferState.DONE:
            account.count(f"{verb}_blocks", len(transfer))
            account.count(f"{verb}_bytes", outcome.num_bytes)
            account.observe(f"{transfer.kind.value}_seconds", now - transfer.admitted)
