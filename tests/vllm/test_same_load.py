"""Turns that want the same blocks at once load them once, and compute what follows them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm import tiering
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import MODES, in_flight, on_disk, reference, run_turn, tiered

BEFORE = prompt(320, 1)
REST, NUM = 960, 6
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 512}


def samples(engine: Engine) -> list[str]:
    """Ask several times at once for a prompt that goes on from the turn before."""
    names = [f"sample{number}" for number in range(NUM)]
    for name in names:
        engine.add(name, BEFORE + reference(BEFORE, 16) + prompt(REST, 2), 4)
    return names


def after_a_turn(engine: Engine) -> Engine:
    """DRAM has what it left, VRAM does not."""
    run_turn(engine, "before", BEFORE, program="before")
    tiering.park(engine)
    return engine


@MODES
@pytest.mark.parametrize("groups", ["full", "hybrid", "chunked", "state"])
@pytest.mark.parametrize("order", [{}, {"max_head_start_s": 0}], ids=["ours", "vllms"])
def test_samples_compute_what_one_of_them_would(
    groups: str, order: dict[str, Any], async_scheduling: bool
) -> None:
    options = OPTIONS | {"groups": groups, "async_scheduling": async_scheduling}
    stock = Engine(400, connector=None, **options)
    samples(stock)
    stock.run_until_idle()
    engine = after_a_turn(tiered(400, 400, config=order, **options))
    before = engine.num_prefill_tokens
    names = samples(engine)
    engine.run_until_idle()
    assert tiering.answers_as_without_a_tier(engine, *names)
    assert engine.cached[names[0]][1] > 0
    assert len(in_flight(engine, Kind.LOAD)) == 0
    assert tiering.total(engine, "loads", "done") == 1
    assert engine.num_prefill_tokens - before <= stock.num_prefill_tokens - len(BEFORE)
    tiering.wind_down(engine)


def test_what_the_disk_has_comes_up_once() -> None:
    engine = on_disk(400, 40, 400, **OPTIONS)
    run_turn(engine, "before", BEFORE, program="before")
    for number in range(3):
        tiering.come_to_rest(engine)
        run_turn(engine, f"other{number}", 500, seed=10 + number, program=f"other{number}")
    tiering.come_to_rest(engine)
    tiering.park(engine)
    before = engine.num_prefill_tokens
    names = samples(engine)
    engine.run_until_idle()
    assert tiering.answers_as_without_a_tier(engine, *names)
    assert tiering.total(engine, "loads", "done") == 1
    assert engine.num_prefill_tokens - before <= REST + 16 * NUM


def loading(**options: Any) -> tuple[Engine, list[str]]:
    """The first sample loads, which stays under way, and the others wait without a block."""
    engine = after_a_turn(tiered(400, 400, **OPTIONS, **options))
    tiering.hold(engine)
    names = samples(engine)
    for _ in range(5):
        engine.step()
        tiering.check(engine)
    (load,) = in_flight(engine, Kind.LOAD)
    assert load.request_id == names[0]
    hidden = engine.connector.side.waits.same_load._hidden
    assert [sorted(each) for each in hidden.values()] == [names[1:]]
    return engine, names


def is_over(engine: Engine, names: list[str]) -> None:
    tiering.hold(engine, False)
    engine.settle()
    engine.run_until_idle()
    assert not engine.connector.side.waits.same_load._hidden
    assert tiering.answers_as_without_a_tier(engine, *names)
    tiering.wind_down(engine)


def test_others_pass_those_that_wait() -> None:
    engine, names = loading()
    engine.add("new", 100, 2, seed=9)
    engine.add("same beginning", BEFORE + prompt(50, 4), 2)
    engine.run_until_idle(until=lambda: "new" in engine.finish_reasons)
    assert not engine.finish_reasons.keys() & {*names, "same beginning"}
    is_over(engine, names)


@pytest.mark.parametrize("how", ["fails", "goes away", "is switched off", "is put back", "hangs"])
def test_nobody_waits_for_a_load_that_brings_nothing(how: str, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    engine, names = loading(config={"switch_path": str(switch)})
    if how == "fails":
        engine.fail()
    elif how == "goes away":
        engine.abort(names.pop(0))
    elif how == "is switched off":
        switch.write_text("off\n")
        engine.connector.switch.look()
        engine.run_until_idle(until=lambda: names[1] in engine.finish_reasons)
    elif how == "is put back":
        engine.reset_prefix_cache(reset_running_requests=True)
    else:
        engine.workers[0].report_tier_down("the copy hangs")
        engine.clock.advance(1.0)
        for _ in range(3):
            engine.step()
        engine.run_until_idle(until=lambda: names[1] in engine.finish_reasons)
    is_over(engine, names)


def test_a_turn_that_waits_may_go_away() -> None:
    engine, names = loading()
    engine.abort(names.pop(2))
    engine.step()
    tiering.check(engine)
    is_over(engine, names)
