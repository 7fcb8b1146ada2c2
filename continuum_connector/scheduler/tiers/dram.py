"""DramTier: keeps finished turns' blocks in host memory and gives them back (base.py, Tier).

It owns the host index; Traffic owns its copies. A copy that fails ends as a miss: its slots are
forgotten and its tokens are computed again (law 4).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import ChainBlocks, Key, KvGroups, block_key
from continuum_connector.scheduler.tiers.base import Below, RankAt, TierEvents
from continuum_connector.scheduler.tiers.finding import Finder
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Chain
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
    Transfer,
    TransferState,
)

MOST_CHANGED = 8  # of a chain, an eighth may be other than the prompt that goes on from it
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class DramPlan:
    """Host memory as configured. `num_slots`: of each rank, 0 for no tier. `block_bytes`: of one
    block on all ranks. `is_default`: nobody asked for this size, so what is there is all that is
    wanted.
    """

    num_slots: int
    block_bytes: int
    is_default: bool = False


class DramTier:
    """The scheduler's view of host memory, and of what lies `below` it. With no slots it holds
    nothing and finds nothing.

    A slot can be used once every rank has reported it. `rank_at`: the worth of chains, also of the
    one being stored. Those worth least leave first; with None, the least recently used.
    """

    def __init__(
        self,
        plan: DramPlan,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
        events: TierEvents | None = None,
        rank_at: RankAt | None = None,
        below: Callable[[HostIndex], Below] | None = None,
    ) -> None:
        self.index = HostIndex(0, not groups.are_simple, below)
        self.below = self.index.below
        self.names: Sequence[str] = ("dram", *self.below.names)
        self.is_up = plan.num_slots > 0
        self._down_reason = ""
        self.rank_at = rank_at
        self.num_wanted_slots = plan.num_slots
        self._num_there = 0
        self._block_bytes = plan.block_bytes
        self._ready_slots: dict[int, int] = {}  # rank -> host slots it can use
        self.traffic = traffic
        self._owner = Owner(self._settled, self._hangs)
        self._account = account
        self.events = events
        self._groups = groups
        self._found = Finder(self.index, groups)
        # For each store under way, the end and the key of the block that comes first in its chain.
        self._firsts: dict[int, tuple[int, Key]] = {}
        self._is_default = plan.is_default
        account.gauge("tier_up", float(self.is_up))

    @property
    def num_blocks(self) -> int:
        return max(self.num_wanted_slots, self.below.num_blocks) if self.is_up else 0

    @property
    def down_reason(self) -> str:
        return self._down_reason or self.below.down_reason

    # --- stores -----------------------------------------------------------------------
    def store(
        self,
        program: str,
        blocks: ChainBlocks,
        now: float,
        request: Any = None,
        is_prompt_own: bool = True,
    ) -> bool:
        """HostIndex.reserve says which older chains this supersedes."""
        keys, is_up = blocks.keys, self.is_up
        if None in keys:  # vLLM forgot them while a pin held them (BlockPool.evict_blocks)
            is_up = is_up and self._groups.are_simple
            num_named = next(number for number, key in enumerate(keys) if key is None)
            blocks = blocks.only(range(num_named))
            keys = blocks.keys
        if not is_up:
            return False
        rank = None if self.rank_at is None else self.rank_at(now)
        evicted_before, refused_before = self.index.num_evicted, self.index.num_refused
        num_prompt = _num_prompt(blocks, request) if is_prompt_own else 0
        numbers = self.index.slots_of(keys, program)
        missing = (numbers < 0).nonzero()[0]
        slots = self.index.reserve(keys, program, now, rank, num_prompt, blocks.ends, numbers)
        self._account.count("dram_evicted_blocks", self.index.num_evicted - evicted_before)
        num_refused = self.index.num_refused - refused_before
        self._account.count("dram_refused_blocks", num_refused)
        has_most = 2 * num_refused <= len(blocks) if self._groups.are_simple else not num_refused
        if not len(slots):
            return has_most
        if len(slots) < len(blocks):
            blocks = blocks.only(missing[: len(slots)].tolist())
        transfer = self.traffic.store(self._owner, program, blocks, slots, now)
        self._firsts[transfer.id] = blocks.ends[0], blocks.keys[0]
        if self.events is not None and request is not None:
            self.events.describe(transfer.id, request, blocks.keys, blocks.ends)
        return has_most

    # --- loads ------------------------------------------------------------------------
    def find(self, request: Any, num_vram_tokens: int) -> int:
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
    ) -> Mapping[str, int]:
        start = self._found.start_of(request.request_id)
        blocks, slots = self._found.take(request, block_ids, num_tokens)
        # vLLM waits for this load now. If a slot has gone since the promise, the load names no
        # slots, so that every rank refuses it and its tokens are computed again.
        slots = np.full(len(blocks), -1) if slots is None else self.index.acquire(slots)
        self.traffic.load(self._owner, program, request.request_id, blocks, slots, now)
        self.index.use(program, slots[-1:], now)
        came_up = self.below.came_up(request.request_id, start, num_tokens)
        return {"dram": num_tokens - sum(came_up.values()), **came_up}

    def forget_request(self, request_id: str) -> None:
        self.below.forget(request_id)
        self._found.forget(request_id)

    # --- what leaves ------------------------------------------------------------------
    def lend(self, program: str, request: Any, num_tokens: int) -> None:
        if not self._groups.are_simple:  # windows and states: VRAM has others than DRAM
            return
        for chain in reversed(self.index.chains_of(program)):
            if self._is_of(chain, request.block_hashes, num_tokens):
                self.index.order.lend(chain, request.request_id)
                return

    def _is_of(self, chain: Chain, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether the first `num_tokens` of that prompt are nearly all of the chain. Not to its
        end, because the prompt may repeat the answer without the thinking in it."""
        length = len(chain.tickets)
        num = max(1, length - max(1, length // MOST_CHANGED))
        has_it = num * self._groups.hash_size <= num_tokens and num <= len(hashes)
        if not has_it:
            return False
        return self.index.is_at(int(chain.tickets[num - 1]), block_key(hashes[num - 1], 0))

    def take_back(self, program: str) -> None:
        self.index.order.take_back(program)

    def end_loan(self, program: str, request_id: str) -> int:
        return self.index.order.end_loan(program, request_id)

    def demote(self, program: str, blocks: ChainBlocks, request: Any) -> None:
        keys = [key for key in blocks.keys if key is not None]
        self.index.demote(program, keys, _num_prompt(blocks, request))
        self.below.demote(program, blocks.keys)

    def demote_all(self, program: str) -> None:
        self.index.demote_all(program)
        self.below.demote_all(program)

    def residence_s(self, now: float) -> float:
        return self.index.residence.seconds(now)

    def reset(self) -> list[Transfer]:
        over = self.below.reset() + self.traffic.abandon(self._owner)
        self.index.clear()
        return over

    # --- every step -------------------------------------------------------------------
    @property
    def next_look(self) -> float:
        return self.traffic.next_look(self.below.look_every_s)

    def plan(self, now: float) -> StepPlan:
        self.traffic.look(now)
        self.index.past.tidy()
        self.below.step(now)
        return self.traffic.drain()

    def hear(self, report: WorkerReport) -> None:
        """Take in how many slots a rank has, or that it has none any more."""
        if report.tier_down and self.is_up:
            self._go_down(report.tier_down)
        if report.ready_slots:
            self._grow(report.ready_slots)
        self.below.hear(report)

    def take_events(self) -> list[Any]:
        self.below.announce()
        gone = self.index.take_gone()
        if self.events is None:
            return []
        self.events.removed(gone)
        return self.events.take()

    def update_gauges(self) -> None:
        account, index = self._account, self.index
        account.gauge("dram_capacity_blocks", self._num_there if self.is_up else 0)
        account.gauge("dram_blocks", index.num_ready, "ready")
        account.gauge("dram_blocks", index.num_writing, "writing")
        account.gauge("dram_used_bytes", (index.num_slots - index.num_free) * self._block_bytes)
        self.below.update_gauges()

    # --- parts ------------------------------------------------------------------------
    def _grow(self, ready_slots: dict[int, int]) -> None:
        """A block lies in the same slot on every rank, so the slowest rank sets the pace."""
        self._ready_slots |= ready_slots
        if len(self._ready_slots) == self.traffic.world_size:
            self._num_there = min(self.num_wanted_slots, *self._ready_slots.values())
            self.index.grow(self._num_there)
            if self._is_default:
                self._account.gauge("dram_wanted_blocks", self._num_there)

    def _settled(self, transfer: Transfer) -> None:
        if transfer.kind is Kind.STORE:
            first = self._firsts.pop(transfer.id)
            if transfer.state is TransferState.DONE:
                self._found.came(*first)
            self.index.settle(transfer.slots, stored=transfer.state is TransferState.DONE)
            if transfer.state is TransferState.DONE:
                self.below.stored(transfer.program)
            if self.events is not None:
                self.events.stored(transfer.id, set(self.index.keys_of(transfer.slots)))
        elif transfer.slots[0] >= 0:
            if transfer.outcome is not None and "corrupt" in transfer.outcome.reasons:
                self.below.doubted(transfer.slots)
            self.index.release(transfer.slots, corrupt=transfer.state is TransferState.FAILED)

    def _hangs(self, sentence: str) -> None:
        if self.is_up:
            self._go_down(sentence)
            logger.warning("No DRAM tier: %s; restart the server", sentence)

    def _go_down(self, reason: str) -> None:
        self.is_up = False
        self._down_reason = reason
        self.index.clear()
        if self.events is not None:
            self.events.lost()
        self._account.gauge("tier_up", 0.0)
        self.below.dram_down()


def _num_prompt(blocks: ChainBlocks, request: Any) -> int:
    """How many of a turn's blocks its prompt has, less the last, which may hold what its template
    puts before an answer alone; 0 where the turn is not known any more."""
    num = 0 if request is None else bisect_right(blocks.ends, request.num_prompt_tokens)
    return max(0, num - 1)
