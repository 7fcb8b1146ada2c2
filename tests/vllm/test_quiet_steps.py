"""Steps that only decode: our bookkeeping sits them out, and misses nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from continuum_connector import build
from continuum_connector.connector import TELL_EVERY_S, StepMetadata
from continuum_connector.messages import StepPlan, StoreOrder
from continuum_connector.observe.metrics import ContinuumStats
from continuum_connector.scheduler.scheduler import LOOK_S
from continuum_connector.vllm import compat
from tests.vllm import tiering
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def watch(target: Any, name: str) -> list[int]:
    """Return a list that grows with every call of `target.name`."""
    calls: list[int] = []
    original: Callable[..., Any] = getattr(target, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return original(*args, **kwargs)

    setattr(target, name, counted)
    return calls


def decoding(engine: Engine, max_tokens: int = 200) -> None:
    """One turn generates, and the step that admitted it is over."""
    engine.add("busy", 40, max_tokens, seed=9, program="busy", final=True)
    for _ in range(4):
        engine.step()


@MODES
def test_while_a_turn_only_decodes_nothing_is_planned_between_looks(
    async_scheduling: bool,
) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling)
    decoding(engine)
    plans = watch(engine.side.steps, "plan")
    engine.steps(100)
    assert len(plans) <= 100 * engine.step_s / LOOK_S + 1


@MODES
def test_a_pin_ends_in_the_step_after_its_deadline_though_nothing_else_happens(
    async_scheduling: bool,
) -> None:
    config = {"ttl_s": 0.2, "max_ttl_s": 0.2}
    engine = AgentEngine(async_scheduling=async_scheduling, extra_config=config)
    decoding(engine)
    engine.add("a", 100, 1, seed=1, program="a")
    engine.run_until_idle(until=lambda: bool(engine.num_pins()))
    due = next(iter(engine.side.pins)).deadline
    engine.run_until_idle(until=lambda: not engine.num_pins())
    assert engine.ends() == {"expired": 1}
    assert due <= engine.clock() <= due + 2 * engine.step_s


@MODES
@pytest.mark.parametrize("what", ["finish", "arrival", "reset", "switch"])
def test_whatever_happens_is_followed_by_the_next_step(async_scheduling: bool, what: str) -> None:
    engine = tiering.tiered(200, 400, async_scheduling=async_scheduling)
    decoding(engine)
    if what == "finish":
        engine.add("a", 100, 20, seed=1, program="a")
        engine.run_until_idle(until=lambda: "a" in engine.finish_reasons)
    elif what == "arrival":
        engine.add("a", 100, 20, seed=1, program="a")
    elif what == "reset":
        engine.reset_prefix_cache()
    else:
        engine.connector.switch.is_on = False
    plans = watch(engine.connector.side.steps, "plan")
    engine.step()
    assert len(plans) == 1
    tiering.check(engine)


@MODES
def test_a_step_is_planned_as_long_as_a_copy_is_under_way(async_scheduling: bool) -> None:
    engine = tiering.tiered(200, 400, async_scheduling=async_scheduling, hold_transfers=True)
    decoding(engine)
    engine.add("a", 100, 1, seed=1, program="a")
    engine.run_until_idle(until=lambda: bool(len(engine.connector.side.traffic.ledger)))
    for _ in range(4):
        engine.step()
    plans = watch(engine.connector.side.steps, "plan")
    for _ in range(10):
        engine.step()
    assert len(plans) == 10


def test_numbers_are_told_once_a_second_and_at_once_when_the_last_turn_has_ended() -> None:
    engine = AgentEngine()
    told: list[tuple[float, ContinuumStats]] = []
    take = engine.connector.get_kv_connector_stats

    def tell() -> ContinuumStats | None:
        stats: ContinuumStats | None = take()
        if stats is not None:
            told.append((engine.clock(), stats))
        return stats

    engine.connector.get_kv_connector_stats = tell
    decoding(engine, 300)
    began = engine.clock()
    for number in range(20):
        engine.add(f"a{number}", 40, 2, seed=number, program=f"a{number}")
        engine.steps(10)
    lasted = engine.clock() - began
    assert 2 <= len([at for at, _ in told if at > began]) <= lasted / TELL_EVERY_S + 1
    engine.run_until_idle()
    counters = [stats.data["counters"] for _, stats in told if "counters" in stats.data]
    ended = sum(n for each in counters for key, n in each.items() if key.startswith("decisions"))
    assert ended == 21


def a_worker_half() -> Any:
    """Without a tier, so each order settles at once."""
    engine = Engine(enable_prefix_caching=False)  # aside, as a worker's half is to the scheduler
    half = engine.connector
    half.worker = build.worker(half.config, half._vllm_config)
    return half


def a_step(half: Any, plan: StepPlan) -> tuple[Any, Any]:
    """As vLLM's model runner takes it; what it passes on of ours."""
    half.bind_connector_metadata(StepMetadata(plan))
    assert not half.has_connector_metadata(), "so vLLM calls no hook for a layer"
    half.start_load_kv(None)
    half.wait_for_save()
    half.get_finished(set())
    told = half.get_kv_connector_stats(), half.build_connector_worker_meta()
    half.clear_connector_metadata()
    return told


def test_so_is_what_a_worker_half_took_which_knows_no_turns() -> None:
    half, now, told = a_worker_half(), 100.0, []
    half.set_clock(lambda: now)
    for number in range(5):
        now = 100.0 + 0.3 * number
        plan = StepPlan(stores=(StoreOrder(number, np.int32([1]), np.int32([1])),))
        stats, meta = a_step(half, plan)
        assert [*meta.report.outcomes] == [number]
        told.append(stats)
    assert [stats is not None for stats in told] == [True, False, False, False, True]
    cells = told[-1].data["histograms"]["hook_seconds{wait_for_save}"]
    assert sum(num for _, num, _ in cells) == 4, "of all steps since"


def test_a_worker_half_without_orders_times_nothing_and_tells_nothing() -> None:
    half = a_worker_half()
    a_step(half, StepPlan(cancels=(7,)))
    before = half.account.total("hook_seconds")
    assert before == 2.0, "its loads and its stores"
    told = [a_step(half, StepPlan(epoch=number)) for number in range(5)]
    assert {meta for _, meta in told} == {None}
    assert half.account.total("hook_seconds") == before


def test_a_profiler_sees_each_hook_by_its_name_and_nobody_else_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Engine().connector.account.scope is None, "as by default"
    opened: list[str] = []

    @contextlib.contextmanager
    def annotate(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr("vllm.v1.utils._PROFILER_FUNC", annotate)  # as its environment makes it
    engine = Engine()
    opened.clear()
    engine.add("r", 64, 2)
    engine.run_until_idle()
    assert {"continuum: build_connector_meta", "continuum: request_finished"} <= {*opened}


def test_a_vllm_without_such_ranges_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.utils", None)  # importing it raises
    assert compat.profiler_scope() is None
