"""Every step of vLLM's own scheduler is timed and its work counted, sync and async."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector import costs
from continuum_connector.vllm import compat
from tests.vllm.harness import Engine

STEP_S = 0.01


class Seen:
    """The steps that the engine's costs are told of, from now on."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[costs.Work, float]] = []
        self._learn = engine.connector.costs.step
        engine.connector.costs.step = self._step

    def _step(self, work: costs.Work, seconds: float) -> None:
        self.steps.append((work, seconds))
        self._learn(work, seconds)


def watched(**options: Any) -> tuple[Engine, Seen]:
    engine = Engine(step_s=0.0, **options)
    return engine, Seen(engine)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every step, those that only decode too."""
    monkeypatch.setattr(costs, "DECODES_PER_LOOK", 1)


def run(engine: Engine) -> None:
    """Step the engine with a model that takes 10 ms for a batch, one batch at a time."""
    free_at = engine.clock()
    in_flight: list[float] = []
    schedule, update = engine._schedule, engine._update

    def slow_schedule() -> bool:
        nonlocal free_at
        executed = schedule()
        free_at = max(free_at, engine.clock()) + (STEP_S if executed else 0.0)
        in_flight.append(free_at)
        return executed

    def slow_update() -> None:
        engine.clock.now = max(engine.clock.now, in_flight.pop(0))
        update()

    engine._schedule, engine._update = slow_schedule, slow_update  # type: ignore[method-assign]
    while engine.step():
        engine.clock.advance(0.001)  # the engine's own work between steps
    engine._schedule, engine._update = schedule, update  # type: ignore[method-assign]


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_step_takes_what_the_model_took(is_async: bool) -> None:
    engine, seen = watched(async_scheduling=is_async)
    engine.add("a", 700, 5, seed=1)
    engine.add("b", 40, 5, seed=2)
    run(engine)
    engine.clock.advance(60.0)  # idle time is nobody's step
    engine.add("c", 100, 2, seed=3)
    run(engine)
    assert sum(work.num_new for work, _ in seen.steps) == 700 + 40 + 100
    # Async scheduling can schedule one decode beyond the last token and throw it away.
    assert sum(work.num_decodes for work, _ in seen.steps) >= 4 + 4 + 1
    assert [seconds for _, seconds in seen.steps] == pytest.approx([STEP_S] * len(seen.steps))
    assert not engine.connector._step_clock._in_flight


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_of_steps_that_only_decode_one_in_eight_is_looked_at_and_timed_as_it_was(
    is_async: bool,
) -> None:
    engine, seen = watched(async_scheduling=is_async)
    engine.add("a", 40, 81, seed=1)
    run(engine)
    decodes = [seconds for work, seconds in seen.steps if not work.num_new]
    assert len(decodes) == 80 // costs.DECODES_PER_LOOK
    assert decodes == pytest.approx([STEP_S] * len(decodes))


@pytest.mark.usefixtures("every_step")
def test_work_is_counted_as_the_scheduler_cuts_it() -> None:
    engine, seen = watched(max_num_batched_tokens=512)
    engine.add("a", 700, 3, seed=1)
    run(engine)
    assert [work for work, _ in seen.steps] == [
        costs.Work(512, 512 * 256.0, 0, 0),
        costs.Work(188, 188 * (512 + 94.0), 0, 0),
        costs.Work(0, 0.0, 1, 700),
        costs.Work(0, 0.0, 1, 701),
    ]


def test_a_cached_prefix_is_context_and_not_work() -> None:
    engine, seen = watched()
    engine.add("a", 160, 1, seed=1)
    run(engine)
    engine.add("b", 200, 1, seed=1)
    run(engine)
    assert seen.steps[-1][0] == costs.Work(40, 40 * (160 + 20.0), 0, 0)


def test_the_last_token_of_a_cached_prompt_is_like_a_decode() -> None:
    engine, seen = watched()
    engine.add("a", 160, 1, seed=1)
    run(engine)
    engine.add("b", 161, 1, seed=1)
    run(engine)
    assert seen.steps[-1][0] == costs.Work(0, 0.0, 1, 160)


def test_a_mixed_step_keeps_prompts_and_decodes_apart() -> None:
    engine, seen = watched()
    engine.add("a", 64, 8, seed=1)
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) == 2)
    engine.add("b", 32, 1, seed=2)
    run(engine)
    mixed = [work for work, _ in seen.steps if work.num_new and work.num_decodes]
    assert mixed == [costs.Work(32, 32 * 16.0, 1, 65)]


def test_prefill_seconds_come_out_of_served_steps_and_reach_the_metrics() -> None:
    engine, _ = watched(max_num_batched_tokens=512)
    for number in range(24):
        engine.add(f"r{number}", 20 + 20 * number, 2, seed=number)
        run(engine)
    assert engine.connector.costs.prefill_s(512) == pytest.approx(STEP_S, rel=0.1)
    account = engine.connector.account
    assert account.total("costs_known", "prefill") == 1
    per_token = account.total("prefill_seconds_per_token", "0")
    assert per_token == pytest.approx(2 * STEP_S / 1000, rel=0.1)


def test_costs_are_published_once_a_second_and_before_the_engine_falls_idle() -> None:
    engine, _ = watched()
    costs, published = engine.connector.costs, []
    gauges = costs.gauges
    costs.gauges = lambda now: published.append(now) or gauges(now)
    engine.add("a", 40, 150, seed=1)  # 1.65 s
    run(engine)
    first, second, *last = published
    assert second - first == pytest.approx(1.0, abs=0.02)
    assert last
    assert all(at > second + 0.5 for at in last)


def test_a_step_whose_turns_only_guess_ahead_is_one_that_decodes() -> None:
    """Such steps are the usual ones of a server with drafts, and cost no look at each turn."""
    engine = Engine(num_drafts=3)
    for number in range(4):
        engine.add(f"r{number}", 40, 30, seed=number)
    for _ in range(3):
        engine.step()
    step = engine.scheduler.schedule()
    assert step.scheduled_spec_decode_tokens
    assert compat.step_work(step, skips_decodes=True) is None
    work = compat.step_work(step)
    context = sum(step.scheduled_cached_reqs.num_computed_tokens)
    assert work == costs.Work(num_decodes=4, decode_context=context)
