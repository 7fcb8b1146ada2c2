"""Whatever keeps the contract of Below lies below DRAM: here a store that replicas share.

It is a dict. Nothing of it is the disk's but the orders that move its bytes, and the fake worker's
file, which stands for the place of those bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from continuum_connector import build
from continuum_connector.observe.account import Account, Told
from continuum_connector.scheduler.kv_groups import Key, KvGroups, Numbers, block_key
from continuum_connector.scheduler.tiers.base import Below, NothingBelow, RankAt, Tier
from continuum_connector.scheduler.tiers.dram import DramPlan, DramTier
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Tickets, numbers_of
from continuum_connector.scheduler.tiers.traffic import (
    Kind,
    Owner,
    Traffic,
    Transfer,
    TransferState,
)
from tests.vllm.fake_worker import FakeDisk
from tests.vllm.harness import Engine
from tests.vllm.machine import Machine, run_briefly
from tests.vllm.tiering import (
    MODES,
    answers_as_without_a_tier,
    assert_drained,
    come_to_rest,
    in_flight,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
)

NUM_TOKENS = 208  # that a turn of 200 leaves behind in whole blocks


@dataclass
class Shared:
    """What all replicas have: the place of each key's bytes, and those bytes."""

    places: dict[Key, int] = field(default_factory=dict)
    file: FakeDisk = field(default_factory=FakeDisk)
    new_place: Any = field(default_factory=lambda: itertools.count().__next__)


@dataclass
class Has:
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return {"disk": {"tokens": self.num_tokens}}


class SharedStore(NothingBelow):
    """All that comes to DRAM is written, and all that a turn wants is read. It never evicts."""

    names: Sequence[str] = ("disk",)  # the metrics know it
    brings_up = True

    def __init__(
        self, index: HostIndex, groups: KvGroups, traffic: Traffic, shared: Shared
    ) -> None:
        self._index, self._shared, self._traffic = index, shared, traffic
        self._size = groups.hash_size
        self._owner = Owner(self._settled, self._end, below="disk")
        self._new: dict[str, None] = {}  # programs of which something has come to DRAM
        self._reads: dict[int, tuple[Tickets, list[int]]] = {}  # with the places in their chain
        self._waits: dict[str, int] = {}  # request -> the read that it waits for
        self._came: dict[str, list[int]] = {}  # request -> the places of what came up for it

    @property
    def look_every_s(self) -> float:  # type: ignore[override]
        return 0.0 if self._new else math.inf

    # --- down ---------------------------------------------------------------------------
    def left(self, slots: Numbers, program: str) -> int:
        return sum(key not in self._shared.places for key in self._index.keys_at(slots))

    def stored(self, program: str) -> None:
        self._new[program] = None

    def step(self, now: float) -> None:
        new, self._new = self._new, {}
        for program in new:
            for chain in self._index.chains_of(program):
                self._write(program, chain.tickets[self._index.are_ready(chain.tickets)], now)

    def _write(self, program: str, tickets: Tickets, now: float) -> None:
        keys = self._index.keys_at(numbers_of(tickets))
        wanted = [n for n, key in enumerate(keys) if key not in self._shared.places]
        if wanted:
            places = [self._shared.new_place() for _ in wanted]
            slots = self._index.acquire(tickets[wanted])
            what = Kind.WRITE, program, np.array(places, np.int32), slots
            self._traffic.below(self._owner, *what, now, [keys[n] for n in wanted], wanted)

    # --- up -----------------------------------------------------------------------------
    def bring_up(
        self,
        program: str,
        request: Any,
        num_vram_tokens: int,
        num_turns: int,
        now: float,
        before: Told | None = None,
    ) -> Told | None:
        num_blocks = (request.num_tokens - 1) // self._size
        keys = [block_key(each, 0) for each in request.block_hashes[:num_blocks]]
        has, wanted = self._shared.places, []
        for number, key in enumerate(keys[num_vram_tokens // self._size :]):
            if key not in self._index and key not in has:
                break
            if key not in self._index:
                wanted.append(number + num_vram_tokens // self._size)
        if not wanted or request.request_id in self._waits:
            return before
        end = wanted[-1] + 1
        ends = range(self._size, (end + 1) * self._size, self._size)
        is_wanted = {keys[n] for n in wanted}
        chain = [n for n in range(end) if keys[n] in self._index or keys[n] in is_wanted]
        named = [keys[n] for n in chain]
        tickets = self._index.reserve(named, program, now, ends=[ends[n] for n in chain])
        wanted = wanted[: len(tickets)]
        if wanted:
            places = np.array([has[keys[n]] for n in wanted], np.int32)
            what, named = (Kind.READ, program, places, tickets), [keys[n] for n in wanted]
            read = self._traffic.below(self._owner, *what, now, named, wanted)
            self._reads[read.id] = tickets, wanted
            self._waits[request.request_id] = read.id
        return Has(len(wanted) * self._size)

    def awaits(self, request_id: str, now: float) -> bool:
        return self._waits.get(request_id) in self._reads

    def came_up(self, request_id: str, start: int, num_tokens: int) -> Mapping[str, int]:
        first, num = start // self._size, num_tokens // self._size
        came = self._came.get(request_id, ())
        return {"disk": self._size * sum(first <= place < first + num for place in came)}

    def forget(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
        self._came.pop(request_id, None)

    # --- both ---------------------------------------------------------------------------
    def _settled(self, transfer: Transfer) -> None:
        is_done = transfer.state is TransferState.DONE
        if transfer.kind is Kind.WRITE:
            self._index.release(transfer.slots)
            if is_done:
                places = transfer.blocks.tolist()
                self._shared.places.update(zip(transfer.keys, places, strict=True))
            return
        tickets, places = self._reads.pop(transfer.id)
        self._index.settle(tickets, stored=is_done)
        for request_id, read in self._waits.items():
            if read == transfer.id and is_done:
                self._came[request_id] = places

    def reset(self) -> list[Transfer]:
        self._shared.places.clear()
        self._new.clear()
        return self._traffic.abandon(self._owner)

    def dram_down(self) -> None:
        self._end("there is no DRAM above it")

    def _end(self, why: str) -> None:
        self._new.clear()
        self._traffic.abandon(self._owner)


def build_over(monkeypatch: pytest.MonkeyPatch, shared: Callable[[], Shared]) -> None:
    """From now on each engine is built over what `shared` returns."""

    def make_tier(
        dram: DramPlan,
        disk: Any,
        groups: KvGroups,
        traffic: Traffic,
        account: Account,
        events: Any,
        rank_at: RankAt | None,
        has_waiting: Any,
    ) -> Tier:
        def below(index: HostIndex) -> Below:
            if not groups.are_simple:
                return NothingBelow()
            return SharedStore(index, groups, traffic, shared())

        return DramTier(dram, groups, traffic, account, None, rank_at, below)

    monkeypatch.setattr(build, "make_tier", make_tier)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    """One store, over which all engines are built."""
    store = Shared()
    build_over(monkeypatch, lambda: store)
    return store


def replica(shared: Shared, **options: Any) -> Engine:
    """One whose DRAM holds three turns."""
    engine = tiered(num_slots=40, **options)
    for worker in engine.workers:
        worker.disk = shared.file
    return engine


def lose(engine: Engine) -> None:
    """`a` has a turn, then others until DRAM has nothing of it any more."""
    run_turn(engine, "a", 200, program="p")
    park(engine)
    for number in range(5):
        run_turn(engine, f"other{number}", 200, seed=10 + number, program=f"other{number}")
        park(engine)
        come_to_rest(engine)


def found(engine: Engine, request_id: str) -> Any:
    return engine.kv_transfer_params[request_id]["continuum"]["cached_tokens"]


def wind_down(engine: Engine) -> None:
    assert answers_as_without_a_tier(engine)
    outlast_pins(engine)
    come_to_rest(engine)
    assert_drained(engine)


@MODES
def test_what_left_dram_comes_back_from_below(shared: Shared, async_scheduling: bool) -> None:
    engine = replica(shared, async_scheduling=async_scheduling)
    lose(engine)
    first = block_key(engine.requests["a"].block_hashes[0], 0)
    assert first not in engine.connector.side.tier.index
    assert first in shared.places
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, NUM_TOKENS)
    assert found(engine, "b") == {"vram": 0, "dram": 0, "disk": NUM_TOKENS}
    assert total(engine, "hit_tokens", "disk") == NUM_TOKENS
    assert engine.connector.side.tier.residence_s(engine.clock()) == math.inf, "nothing is lost"
    wind_down(engine)


def test_a_turn_waits_for_what_comes_up_and_others_pass_it(shared: Shared) -> None:
    engine = replica(shared)
    lose(engine)
    shared.file.is_held = True
    engine.add("b", engine.next_prompt("a", 20), program="p")
    for _ in range(5):
        engine.step()
    assert len(in_flight(engine, Kind.READ)) == 1
    assert len(engine.connector.side.waits.from_below._hidden) == 1
    assert engine.usage() == 0
    run_turn(engine, "c", 40, seed=99, idle=False)
    assert "b" not in engine.finish_reasons
    shared.file.is_held = False
    engine.run_until_idle()
    assert engine.cached["b"] == (0, NUM_TOKENS)
    wind_down(engine)


def test_another_replica_gets_what_it_never_computed(shared: Shared) -> None:
    one, other = replica(shared), replica(shared)
    run_turn(one, "a", 200, program="p")
    come_to_rest(one)
    run_turn(other, "new", 20, seed=5)
    run_turn(other, "b", one.next_prompt("a", 20), program="p")
    assert other.cached["b"] == (0, NUM_TOKENS)
    assert found(other, "b") == {"vram": 0, "dram": 0, "disk": NUM_TOKENS}
    for engine in (one, other):
        wind_down(engine)


@pytest.mark.parametrize("is_reading", [False, True])
def test_it_forgets_what_an_older_epoch_left(shared: Shared, is_reading: bool) -> None:
    engine = replica(shared)
    lose(engine)
    if is_reading:
        shared.file.is_held = True
        engine.add("b", engine.next_prompt("a", 20), program="p")
        engine.step()
        assert in_flight(engine, Kind.READ)
    engine.connector.reset_cache()
    assert not shared.places
    shared.file.is_held = False
    if is_reading:
        engine.run_until_idle()
    else:
        run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 0)
    wind_down(engine)


def test_the_machine_runs_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build_over(monkeypatch, Shared)
    monkeypatch.setattr(Machine, "may_have_disk", False)
    run_briefly()
