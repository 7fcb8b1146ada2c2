"""Engines with a DRAM tier, and what must be true of their holds and books after any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from bench.sim import versions
from continuum_connector.connector import Mode
from continuum_connector.policy.base import Choice, Offload, must_free
from continuum_connector.scheduler.tiers.disk import Disk
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.traffic import TIMEOUT_S, Kind, Transfer
from continuum_connector.worker import disk
from tests.proofs import num_orphans_read, prove_disk, prove_dram, prove_holds
from tests.vllm.fake_worker import extend_chain, next_token
from tests.vllm.harness import Engine

SLOT_BYTES = 4096  # of the harness' model: two heads of 32, 16 tokens, K and V in bfloat16
BLOCK = 16
MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid", "state"])
RANKS = pytest.mark.parametrize("world_size", [1, 2])
NO_HYBRID_TIER = "this vLLM fails loads by block only, so hybrid groups have no DRAM tier"


def skip_without_tier(groups: str) -> None:
    """Skip where this vLLM has no DRAM tier for such groups."""
    if groups != "full" and not versions.CAN_FAIL_REQUESTS:
        pytest.skip(NO_HYBRID_TIER)


def tiered(
    num_blocks: int = 200, num_slots: int = 400, *, skips: bool = True, **kwargs: Any
) -> Engine:
    """Return an engine whose every rank has `num_slots` host slots; `config` adds our keys.

    Hybrid groups before vLLM 0.30 have no tier: `skips` the test then, or has pins alone.
    """
    timeout_s = kwargs.pop("timeout_s", TIMEOUT_S)  # of stores and loads
    if skips:
        skip_without_tier(kwargs.get("groups", "full"))
    slot_bytes = SLOT_BYTES * (2 if kwargs.get("groups") == "mixed" else 1)
    extra = {"dram_bytes": num_slots * slot_bytes * kwargs.get("world_size", 1)}
    extra |= kwargs.pop("config", {})
    engine = Engine(num_blocks, extra_config=extra, **kwargs)
    if engine.connector.side is not None:
        of_copies = {Kind.STORE: timeout_s, Kind.LOAD: timeout_s}
        engine.connector.side.traffic._timeouts |= of_copies
    return engine


def on_disk(
    num_blocks: int = 200, num_slots: int = 40, disk_slots: int = 200, **kwargs: Any
) -> Engine:
    """Return an engine with little DRAM and a disk below it, `per_slot` blocks in each disk slot.
    `files`: the ranks' disks as an earlier server left them. `costs`: to compute is slow.
    With `open_disks` off a test says when they are open.
    """
    costs = kwargs.pop("costs", Costs())
    read_bytes, open_disks = kwargs.pop("read_bytes", 0), kwargs.pop("open_disks", True)
    per_slot, files = kwargs.pop("per_slot", 1), kwargs.pop("files", ())
    config = {"disk_path": "/disk", "disk_bytes": "1GiB", "policy": "fixed_ttl"}
    config |= kwargs.pop("config", {})
    with patch.multiple(disk, SLOT_BYTES=per_slot * SLOT_BYTES, DRAM_SHARE=1):
        engine = tiered(num_blocks, num_slots, config=config, **kwargs)
    reading = engine.connector.side.tier.below.reading
    reading._plan = replace(reading._plan, costs=costs)
    reading.max_read_bytes = read_bytes or reading.max_read_bytes
    for worker, file in zip(engine.workers, files, strict=False):
        worker.disk = file
    for worker in engine.workers if open_disks else ():
        worker.report_disk(disk_slots)
    return engine


@dataclass(frozen=True)
class Costs:
    """What copies and prompts cost, fixed: seconds per block, and per token."""

    read: float = 1e-4
    load: float = 1e-5
    prefill: float = 1e-2
    knows_prefill: bool = True

    def read_s(self, num_blocks: int) -> float:
        return self.read * num_blocks

    def load_s(self, num_blocks: int) -> float:
        return self.load * num_blocks

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        return self.prefill * num_tokens


def reference(tokens: list[int], num_outputs: int, weights: int = 0) -> list[int]:
    """Return what the fake model answers, computed without any engine."""
    chain: list[int] = []
    extend_chain(chain, tokens, weights)
    outputs = []
    for _ in range(num_outputs):
        outputs.append(next_token(chain, len(chain)))
        extend_chain(chain, outputs[-1:], weights)
    return outputs


def answers_as_without_a_tier(engine: Engine, *request_ids: str) -> bool:
    """Whether those requests' outputs are the model's own, and complete."""
    for each in request_ids or list(engine.requests):
        request, outputs = engine.requests[each], engine.outputs[each]
        if len(outputs) != request.max_tokens:
            return False
        if outputs != reference(list(request.prompt_token_ids), len(outputs)):
            return False
    return True


def total(engine: Engine, name: str, label: str | None = None) -> float:
    return float(engine.connector.account.total(name, label))


def in_flight(engine: Engine, kind: Kind) -> list[Transfer]:
    return [each for each in engine.connector.side.traffic.ledger if each.kind is kind]


def run_turn(
    engine: Engine, request_id: str, tokens: list[int] | int, *, idle: bool = True, **kwargs: Any
) -> None:
    """Run one turn; with `idle` off only until it is answered and its store has left."""
    engine.add(request_id, tokens, **kwargs)
    if idle:
        engine.run_until_idle()
        return
    engine.run_until_idle(until=lambda: request_id in engine.finish_reasons)
    engine.step()


def store_all(engine: Engine) -> None:
    """Let the policy store every turn that may be kept, and pin none; it ranks as before."""
    policy = engine.connector.side.decider.policy
    policy.decide = lambda turn, _: must_free(turn) or Choice(Offload(), "as every turn here")


def outlast_pins(engine: Engine) -> None:
    """Let so much time pass that every pin has expired."""
    engine.clock.advance(100.0)
    engine.run_until_idle()
    assert not len(engine.connector.side.pins)


def come_to_rest(engine: Engine) -> None:
    """Let an idle engine write to its disk whatever it wants to."""
    for _ in range(50):
        engine.idle(0.2)
        if not len(engine.connector.side.traffic):
            return
    raise AssertionError(f"the disk is never done: {engine.describe()}")


def park(engine: Engine) -> None:
    """A long tool call on a busy server: afterwards nothing is left in VRAM."""
    outlast_pins(engine)
    assert engine.usage() == 0
    assert engine.pool.reset_prefix_cache()


def hold(engine: Engine, on: bool = True) -> None:
    """From now on copies stay in flight until a test settles or fails them; or no more."""
    for worker in engine.workers:
        worker.hold = on


def loading(**options: Any) -> Engine:
    """`b` goes on where `a` ended, and waits for what its load brings, which stays in flight."""
    engine = tiered(**options)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    return engine


def check(engine: Engine) -> None:
    """Assert everything that holds between any two calls of the engine."""
    side = engine.connector.side
    prove_holds(side.retention.holds)
    prove_holds(side.traffic.holds)
    if dram := dram_of(engine):
        _check_dram(engine, dram)
    if isinstance(side.tier.below, Disk):
        prove_disk(side.tier.below.index)
    foreign_refs = engine.check()
    # What a load writes to is ours only once its turn is gone, or has lost it in a reset.
    loads = _held(in_flight(engine, Kind.LOAD))
    ours = _held([*side.pins, *in_flight(engine, Kind.STORE)]) + loads
    assert foreign_refs == dict.fromkeys(ours, 1), "references that are neither pin nor copy"
    refs = side.retention.holds._refs + side.traffic.holds._refs
    assert {int(n): int(refs[n]) for n in refs.nonzero()[0]} == ours, "holds are not counted"
    assert total(engine, "pins_started") == total(engine, "pins_ended") + len(side.pins)
    closed = total(engine, "outcomes") + len(side.decider.away.decisions())
    assert total(engine, "decisions") == closed, "a decision has no outcome, or two"
    for kind in Kind:
        outcomes = f"{kind.value}s"
        settled = total(engine, outcomes) + len(in_flight(engine, kind))
        assert total(engine, "transfers_admitted", kind.value) == settled
    # Prometheus takes no step back: vLLM's output loop, and so the server, would end with it.
    assert all(total(engine, "hit_tokens", name) >= 0 for name in side.tier.names)
    if engine.connector.mode is Mode.OFF:
        assert ours == loads, "switched off, and holding blocks"
        assert not side.turns
        assert not len(side.decider.away.decisions())
    assert set(side.turns) <= set(engine.scheduler.requests)
    assert side.waits.bus._num_waiting == sum(turn.num_wanted > 0 for turn in side.turns.all())
    turns = [side.turns.get(request_id) for request_id in side.turns]
    waiting = [turn for turn in turns if not turn.is_admitted]
    for turn in turns:
        assert side.turns.has_waiting(turn.program.key) is any(
            each.program is turn.program for each in waiting
        )
    assert not getattr(side._stock, "has_warned", False), "the shadow's books did not add up"
    world = side.snapshots.take(engine.clock())
    assert (world.num_waiting, world.num_running) == (len(waiting), len(side.turns) - len(waiting))


def _held(holders: Iterable[Any]) -> Counter[int]:
    """How often they hold each block: pins, or copies."""
    holds = (each.hold for each in holders)
    return Counter(block for hold in holds if hold is not None for block in hold.ids.tolist())


def dram_of(engine: Engine) -> DramTier | None:
    """Its host memory; None with one of pretend_tiers.py."""
    tier = engine.connector.side.tier
    return tier if isinstance(tier, DramTier) else None


def _check_dram(engine: Engine, tier: DramTier) -> None:
    prove_dram(tier.index)
    assert engine.connector.mode is not Mode.OFF or not tier.index.num_ready
    assert set(tier._found) <= set(engine.scheduler.requests)
    loads = {each.id for each in in_flight(engine, Kind.LOAD) if each.owner is tier._owner}
    assert tier._brings.keys() == loads
    hidden = engine.connector.side.waits.same_load._hidden.items()
    turns = engine.connector.side.turns
    for first, of_block in hidden:
        assert all(turns.get(name).awaits_load == first for name in of_block)


def assert_drained(engine: Engine) -> None:
    """Assert that nothing is left of a load that has ended: no request, pin, hold or copy."""
    check(engine)
    side = engine.connector.side
    assert not engine.scheduler.requests
    assert len(side.pins) == len(side.traffic) == 0
    assert side.retention.holds.num_holds == side.traffic.holds.num_holds == 0
    if dram := dram_of(engine):
        assert dram.index.num_writing == num_orphans_read(dram.index) == 0
    if isinstance(side.tier.below, Disk):
        assert side.tier.below.index.num_writing == 0
    assert engine.usage() == 0


def wind_down(engine: Engine) -> None:
    """Let every pin of a load that has ended expire, and assert that nothing is left of it."""
    outlast_pins(engine)
    assert_drained(engine)
