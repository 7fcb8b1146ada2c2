"""Engines with a DRAM tier, and what must be true of their holds and books after any step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.connector import Mode
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.transfers import Kind, Transfer
from tests.vllm.fake_worker import extend_chain, next_token
from tests.vllm.harness import Engine

SLOT_BYTES = 4096  # of the harness' model: two heads of 32, 16 tokens, K and V in bfloat16
BLOCK = 16
MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])
RANKS = pytest.mark.parametrize("world_size", [1, 2])
NO_HYBRID_TIER = "this vLLM fails loads by block only, so hybrid groups have no DRAM tier"


def skip_without_tier(groups: str) -> None:
    """Skip where this vLLM has no DRAM tier for such groups."""
    if groups == "hybrid" and not versions.CAN_FAIL_REQUESTS:
        pytest.skip(NO_HYBRID_TIER)


def tiered(num_blocks: int = 200, num_slots: int = 400, **kwargs: Any) -> Engine:
    """Return an engine whose every rank has `num_slots` host slots; `config` adds our keys.

    Skips where there is no such thing: hybrid groups before vLLM 0.30 have no tier.
    """
    skip_without_tier(kwargs.get("groups", "full"))
    extra = {"dram_bytes": num_slots * SLOT_BYTES * kwargs.get("world_size", 1)}
    extra |= kwargs.pop("config", {})
    return Engine(num_blocks, extra_config=extra, **kwargs)


def reference(tokens: list[int], num_outputs: int) -> list[int]:
    """Return what the fake model answers, computed without any engine."""
    chain: list[int] = []
    extend_chain(chain, tokens)
    outputs = []
    for _ in range(num_outputs):
        outputs.append(next_token(chain, len(chain)))
        extend_chain(chain, outputs[-1:])
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


def outlast_pins(engine: Engine) -> None:
    """Let so much time pass that every pin has expired."""
    engine.clock.advance(100.0)
    engine.run_until_idle()
    assert not len(engine.connector.side.pins)


def park(engine: Engine) -> None:
    """A long tool call on a busy server: afterwards nothing is left in VRAM."""
    outlast_pins(engine)
    assert engine.usage() == 0
    assert engine.pool.reset_prefix_cache()


def hold(engine: Engine, on: bool = True) -> None:
    """From now on copies stay in flight until a test settles or fails them; or no more."""
    for worker in engine.workers:
        worker.hold = on


def check(engine: Engine) -> None:
    """Assert everything that holds between any two calls of the engine."""
    side = engine.connector.side
    side.retention.holds.check()
    side.traffic.holds.check()
    side.traffic.ledger.check()
    if isinstance(side.tier, DramTier):  # else one of pretend_tiers.py
        _check_dram(engine, side.tier)
    foreign_refs = engine.check()
    ours: Counter[int] = Counter()
    for pin in side.pins:
        ours.update(pin.hold.ids.tolist())
    for transfer in in_flight(engine, Kind.STORE):
        ours.update(transfer.hold.ids.tolist() if transfer.hold is not None else ())
    assert foreign_refs == dict(ours), "references that are neither pin nor store"
    assert total(engine, "pins_started") == total(engine, "pins_ended") + len(side.pins)
    closed = total(engine, "outcomes") + len(side.records.outcomes)
    assert total(engine, "decisions") == closed, "a decision has no outcome, or two"
    for kind, outcomes in ((Kind.STORE, "stores"), (Kind.LOAD, "loads")):
        settled = total(engine, outcomes) + len(in_flight(engine, kind))
        assert total(engine, "transfers_admitted", kind.value) == settled
    if engine.connector.mode is Mode.OFF:
        assert not ours, "switched off, and holding blocks"
        assert not side.turns
        assert not len(side.records.outcomes)
    assert set(side.turns) <= set(engine.scheduler.requests)
    turns = [side.turns.get(request_id) for request_id in side.turns]
    waiting = [turn for turn in turns if not turn.is_admitted]
    for turn in turns:
        assert side.turns.has_waiting(turn.program.key) is any(
            each.program is turn.program for each in waiting
        )
    world = side.snapshots.snapshot(engine.clock())
    assert (world.num_waiting, world.num_running) == (len(waiting), len(side.turns) - len(waiting))


def _check_dram(engine: Engine, tier: DramTier) -> None:
    tier.index.check()
    assert engine.connector.mode is not Mode.OFF or not tier.index.num_ready
    assert set(tier._found) <= set(engine.scheduler.requests)


def assert_drained(engine: Engine) -> None:
    """Assert that nothing is left of a load that has ended: no request, pin, hold or copy."""
    check(engine)
    side = engine.connector.side
    assert not engine.scheduler.requests
    assert len(side.pins) == len(side.traffic) == 0
    assert side.retention.holds.num_holds == side.traffic.holds.num_holds == 0
    if isinstance(side.tier, DramTier):
        assert side.tier.index.num_writing == side.tier.index.num_orphans_read == 0
    assert engine.usage() == 0
