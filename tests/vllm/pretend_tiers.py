"""Tiers that are none of ours: the scheduler side knows of them what base.py promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from continuum_connector.build import DramPlan, make_tier
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import ChainBlocks, Key, KvGroups, block_key
from continuum_connector.scheduler.tiers.base import NothingBelow, Tier
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
    Transfer,
    TransferState,
)


class Shelf:
    """A dict. It takes what comes until it is full, evicts nothing, and uses no slot twice, so
    that a copy which is late meets nobody."""

    names: Sequence[str] = ("dram",)  # the metrics know it
    below = NothingBelow()

    def __init__(
        self, num_slots: int, groups: KvGroups, traffic: Traffic, first_slot: int = 0
    ) -> None:
        self.traffic = traffic
        self.is_up = num_slots > 0
        self.down_reason = ""
        self.num_wanted_slots = first_slot + num_slots  # asked by the harness alone
        self.slots: dict[Key, int] = {}
        self.ready: set[Key] = set()
        self.promised: dict[str, tuple[int, int]] = {}  # tokens: from, to
        self._next = self._end = first_slot  # those between are free
        self._num_usable: dict[int, int] = {}  # of the host memory's slots, by rank
        self._keys: dict[int, list[Key]] = {}  # of a transfer in flight
        self._groups = groups
        self._owner = Owner(self._settled, self._go_down)

    @property
    def num_blocks(self) -> int:
        return self.num_wanted_slots if self.is_up else 0

    @property
    def next_look(self) -> float:
        return self.traffic.next_look()

    def plan(self, now: float) -> StepPlan:
        self.traffic.look(now)
        return self.traffic.drain()

    def store(
        self,
        program: str,
        blocks: ChainBlocks,
        now: float,
        request: Any = None,
        is_prompt_own: bool = True,
    ) -> bool:
        room = self._end - self._next if self.is_up else 0
        new = [n for n, key in enumerate(blocks.keys) if key not in self.slots]
        if taken := blocks.only(new[:room]):
            slots = np.arange(self._next, self._next + len(taken))
            self._next += len(taken)
            transfer = self.traffic.store(self._owner, program, taken, slots, now)
            keys = self._keys[transfer.id] = taken.keys
            self.slots.update(zip(keys, slots.tolist(), strict=True))
        return len(new) <= room

    def find(self, request: Any, num_vram_tokens: int) -> int:
        hit, hashes = num_vram_tokens, request.block_hashes
        if self._groups.lookup is not None:
            end, has = request.num_tokens - 1, self.ready.__contains__
            hit, _ = self._groups.lookup.longest_hit(hashes, hit, end, has)
        elif self._groups.are_simple:
            end = self._groups.last_end(request.num_tokens)
            while hit < end and block_key(hashes[hit // 16], 0) in self.ready:
                hit += 16
        self.promised[request.request_id] = num_vram_tokens, hit
        return hit - num_vram_tokens

    def is_coming(self, _: bytes) -> bool:
        return False

    def load(
        self,
        program: str,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        now: float,
    ) -> Mapping[str, int]:
        start, _ = self.promised.pop(request.request_id)
        blocks, keys = [], []
        hit, unit = start + num_tokens, self._groups.hash_size
        for group in self._groups:
            size = group.block_size
            for index in range(start // size, -(-hit // size)):
                if block_id := block_ids[group.index][index]:
                    end = min((index + 1) * size, hit)  # a block goes by the hash of its end
                    blocks.append(block_id)
                    keys.append(block_key(request.block_hashes[end // unit - 1], group.index))
        is_there = all(key in self.ready for key in keys)
        slots = np.array([self.slots[key] if is_there else -1 for key in keys])
        ids = np.array(blocks, np.int32)
        transfer = self.traffic.load(self._owner, program, request.request_id, ids, slots, now)
        self._keys[transfer.id] = keys
        return {"dram": num_tokens}

    def forget_request(self, request_id: str) -> None:
        self.promised.pop(request_id, None)

    def lend(self, program: str, request: Any, num_tokens: int) -> None:
        """Nothing is evicted, and nothing lent."""

    def take_back(self, program: str) -> None:
        """Nothing is lent."""

    def end_loan(self, program: str, request_id: str) -> int:
        return 0

    def demote(self, program: str, blocks: ChainBlocks, request: Any) -> None:
        """Nothing is evicted."""

    def demote_all(self, program: str) -> None:
        """Nothing is evicted."""

    def residence_s(self, now: float) -> float:
        return math.inf

    def hear(self, report: WorkerReport) -> None:
        if report.tier_down and self.is_up:
            self._go_down(report.tier_down)
        self._num_usable |= report.ready_slots
        if len(self._num_usable) == self.traffic.world_size:
            usable = min(self.num_wanted_slots, *self._num_usable.values())
            self._end = max(self._end, usable)

    def reset(self, *names: str) -> list[Transfer]:
        over = self.traffic.abandon(self._owner)
        self._forget(list(self.slots))
        return over

    def take_events(self) -> list[Any]:
        return []

    def update_gauges(self) -> None:
        """Nobody looks."""

    def _settled(self, transfer: Transfer) -> None:
        """Keys that were forgotten since, and maybe stored anew, are not this copy's any more."""
        pairs = zip(self._keys.pop(transfer.id), transfer.slots.tolist(), strict=True)
        mine = [key for key, slot in pairs if self.slots.get(key) == slot]
        if transfer.state is not TransferState.DONE:
            self._forget(mine)
        elif transfer.kind is Kind.STORE:
            self.ready.update(mine)

    def _forget(self, keys: list[Key]) -> None:
        for key in keys:
            del self.slots[key]
        self.ready.difference_update(keys)

    def _go_down(self, sentence: str) -> None:
        self.is_up, self.down_reason = False, sentence
        self._forget(list(self.slots))


class DramAndShelf:
    """Two tiers in one, and one of them is ours: a turn is stored to both and loaded from the one
    that has more of it, from the nearer if both have the same."""

    names: Sequence[str] = ("dram",)
    below = NothingBelow()
    take_events = Shelf.take_events

    def __init__(self, near: Tier, far: Shelf) -> None:
        self.near = near
        self._parts: tuple[Any, Any] = near, far
        self.num_wanted_slots = far.num_wanted_slots
        self.traffic, self.plan = near.traffic, near.plan
        self.lend, self.take_back, self.end_loan = near.lend, near.take_back, near.end_loan
        self._chosen: dict[str, Any] = {}

    @property
    def is_up(self) -> bool:
        return any(part.is_up for part in self._parts)

    @property
    def num_blocks(self) -> int:
        return sum(part.num_blocks for part in self._parts)

    @property
    def down_reason(self) -> str:
        return str(next((part.down_reason for part in self._parts if part.down_reason), ""))

    @property
    def next_look(self) -> float:
        return self.near.next_look

    def store(self, *args: Any, **kwargs: Any) -> bool:
        taken = [part.store(*args, **kwargs) for part in self._parts]
        return any(taken)

    def find(self, request: Any, num_vram_tokens: int) -> int:
        near, far = (part.find(request, num_vram_tokens) for part in self._parts)
        self._chosen[request.request_id] = self._parts[far > near]
        return max(near, far)

    def is_coming(self, block_hash: bytes) -> bool:
        return self.near.is_coming(block_hash)

    def load(self, program: str, request: Any, *args: Any) -> Mapping[str, int]:
        chosen = self._chosen.pop(request.request_id)
        return chosen.load(program, request, *args)  # type: ignore[no-any-return]

    def forget_request(self, request_id: str) -> None:
        self._chosen.pop(request_id, None)
        self._all("forget_request", request_id)

    def demote(self, program: str, blocks: ChainBlocks, request: Any) -> None:
        self._all("demote", program, blocks, request)

    def demote_all(self, program: str) -> None:
        self._all("demote_all", program)

    def residence_s(self, now: float) -> float:
        return math.inf

    def hear(self, report: WorkerReport) -> None:
        self._all("hear", report)

    def reset(self, *names: str) -> list[Transfer]:
        return [transfer for part in self._parts for transfer in part.reset(*names)]

    def update_gauges(self) -> None:
        self._all("update_gauges")

    def _all(self, method: str, *args: Any) -> None:
        for part in self._parts:
            getattr(part, method)(*args)


def make_shelf(dram: DramPlan, disk: Any, groups: KvGroups, traffic: Traffic, *_: Any) -> Tier:
    """In the place of make_tier."""
    return Shelf(dram.num_slots, groups, traffic)


def make_both(
    dram: DramPlan, disk: Any, groups: KvGroups, traffic: Traffic, account: Account, *asked: Any
) -> Tier:
    """In the place of make_tier: a fifth of the slots is DRAM, so that the shelf has more."""
    num_near = dram.num_slots // 5
    near = make_tier(replace(dram, num_slots=num_near), None, groups, traffic, account, *asked)
    far = Shelf(dram.num_slots - num_near, groups, traffic, first_slot=num_near)
    return DramAndShelf(near, far)
