"""Turns that wait for a disk cost a step nothing, however many they are: vLLM does not see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.tiering import (
    MODES,
    answers_as_without_a_tier,
    assert_drained,
    check,
    come_to_rest,
    on_disk,
    outlast_pins,
    park,
    run_turn,
)

NAMES = [f"b{number}" for number in range(6)]


class Waiting:
    """`b0` to `b5` go on from what is on disk alone, and have been passed over once; what they
    want is being read until `go_on`. `asked`: for whom vLLM has asked since."""

    def __init__(self, **options: Any) -> None:
        self.engine = engine = on_disk(num_slots=100, disk_slots=400, **options)
        for number in range(16):
            run_turn(engine, f"a{number}", 200, seed=number, program=f"p{number}")
            park(engine)
            come_to_rest(engine)
        self.hold(True)
        for number, name in enumerate(NAMES):
            engine.add(name, engine.next_prompt(f"a{number}", 20), program=f"p{number}")
        self.asked: list[str] = []
        self._own = engine.scheduler.connector.get_num_new_matched_tokens
        engine.scheduler.connector.get_num_new_matched_tokens = self._ask
        engine.step()
        assert sorted(self.asked) == NAMES
        self.asked.clear()

    def _ask(self, request: Any, num_tokens: int) -> Any:
        self.asked.append(request.request_id)
        return self._own(request, num_tokens)

    def hold(self, on: bool) -> None:
        for worker in self.engine.workers:
            worker.disk.is_held = on

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            check(self.engine)

    def finish(self) -> None:
        self.hold(False)
        self.engine.run_until_idle()
        assert not len(self.engine.connector.side.waits.from_below._hidden)
        outlast_pins(self.engine)
        come_to_rest(self.engine)
        assert_drained(self.engine)


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_vllm_is_not_asked_for_them_again_until_it_is_read(
    async_scheduling: bool, policy: str
) -> None:
    waiting = Waiting(async_scheduling=async_scheduling, policy=policy)
    engine = waiting.engine
    waiting.steps(10)
    assert waiting.asked == []
    assert sum(engine.scheduler.get_request_counts()) == len(NAMES)
    engine.add("c", 40, seed=99)  # others pass them
    engine.run_until_idle(until=lambda: "c" in engine.finish_reasons)
    assert set(waiting.asked) == {"c"}
    engine.abort("b3")
    assert len(engine.connector.side.waits.from_below._hidden) == len(NAMES) - 1
    waiting.finish()
    assert {engine.cached[name] for name in NAMES if name != "b3"} == {(0, 208)}
    assert answers_as_without_a_tier(engine, "c", *(name for name in NAMES if name != "b3"))


def test_they_are_seen_again_at_their_deadline() -> None:
    waiting = Waiting(config={"disk_timeout_s": 1.0})
    waiting.engine.clock.advance(1.0)
    waiting.steps(10)  # each has tokens for two of them
    assert sorted(set(waiting.asked)) == NAMES
    waiting.finish()
    assert answers_as_without_a_tier(waiting.engine)


@pytest.mark.parametrize("how", ["reset", "disk down", "switched off"])
def test_they_are_seen_again_where_there_is_nothing_to_wait_for(how: str) -> None:
    waiting = Waiting()
    engine = waiting.engine
    if how == "reset":
        assert engine.reset_prefix_cache()
    elif how == "disk down":
        engine.worker.report_disk_down("it was pulled out")
    else:
        engine.connector.switch = SimpleNamespace(is_on=False, close=lambda: None)
    waiting.steps(10)  # each has tokens for two of them
    assert sorted(set(waiting.asked)) == NAMES
    waiting.finish()
    assert answers_as_without_a_tier(engine)


def test_a_step_looks_at_a_few_of_them_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("continuum_connector.scheduler.waits.CHECKED_PER_STEP", 2)
    waiting = Waiting()
    looks: list[str] = []
    below = waiting.engine.connector.side.tier.below
    own = below.awaits

    def awaits(request_id: str, now: float) -> bool:
        looks.append(request_id)
        return bool(own(request_id, now))

    below.awaits = awaits
    waiting.steps(3)
    assert sorted(looks) == NAMES
    waiting.finish()
    assert answers_as_without_a_tier(waiting.engine)


def test_what_is_read_for_a_turn_is_worth_a_turn_that_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that is away, whose blocks may find no room in DRAM."""
    engine = on_disk()
    engine.add("a", 320, 4, program="p")
    engine.run_until_idle()
    side = engine.connector.side
    away, seen = side.decider.away, []
    monkeypatch.setattr(
        side.waits.from_below, "bring_up", lambda *_: seen.append(away.forecast_of("job:p"))
    )
    assert away.forecast_of("job:p") is not None
    engine.add("b", engine.next_prompt("a", 16), 4, program="p")
    assert seen == [None]


def test_an_idle_engine_is_woken_for_what_is_to_be_written_once_a_store_has_settled() -> None:
    """It has no request, so only the waker lets it take the step in which the write begins."""
    engine = on_disk(200, 40, 200)
    times: dict[str, float] = {}
    side = engine.connector.side
    side.steps._waker = SimpleNamespace(set=lambda at, whose="pins": times.update({whose: at}))
    for worker in engine.workers:
        worker.hold = True
    engine.add("a", 300, program="p")
    engine.run_until_idle(until=lambda: "a" in engine.finish_reasons)
    while len(side.traffic) == 0:
        engine.step()
    for worker in engine.workers:
        worker.hold = False
    engine.settle()
    while engine.step():
        engine.settle()
    assert not len(side.traffic), "the store is over, and the write has not begun"
    assert engine.clock() < times["tier"] < engine.clock() + 1.0
