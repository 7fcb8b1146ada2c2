"""Whatever keeps the contract of base.py is a tier: the scheduler side cannot tell which it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from continuum_connector import build
from continuum_connector.scheduler.tiers.traffic import HANGS_AFTER_S, Kind
from tests.vllm import pretend_tiers
from tests.vllm.harness import Engine
from tests.vllm.machine import Machine, run_briefly
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    answers_as_without_a_tier,
    assert_drained,
    come_to_rest,
    hold,
    in_flight,
    on_disk,
    outlast_pins,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)

MAKERS = {"shelf": pretend_tiers.make_shelf, "dram and shelf": pretend_tiers.make_both}


OURS = "dram and disk"


@pytest.fixture(params=MAKERS)
def with_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """From now on engines are built with one of the tiers above in the place of ours."""
    monkeypatch.setattr(build, "make_tier", MAKERS[request.param])
    return str(request.param)


@pytest.fixture(params=[*MAKERS, OURS])
def with_any_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, or with our own of two kinds of memory."""
    if request.param in MAKERS:
        monkeypatch.setattr(build, "make_tier", MAKERS[request.param])
    return str(request.param)


def fill_dram(engine: Engine) -> None:
    """What came before is on disk alone."""
    for number in range(5):
        run_turn(engine, f"more{number}", 200, seed=10 + number, program=f"more{number}")
        park(engine)
        come_to_rest(engine)


Between = Callable[[Engine], Any]
BETWEEN: dict[str, tuple[Between, int]] = {  # what happens before a turn is back, tokens loaded
    "nothing": (lambda engine: None, 208),
    "a reset": (lambda engine: engine.connector.reset_cache(), 0),
    "a rank without memory": (lambda engine: engine.worker.report_tier_down("it is gone"), 0),
}


@MODES
@GROUPS
@pytest.mark.parametrize("between", BETWEEN)
def test_a_turn_comes_back_from_any_tier(
    with_any_tier: str, async_scheduling: bool, groups: str, between: str
) -> None:
    happens, num_loaded = BETWEEN[between]
    has_disk = with_any_tier == OURS
    if has_disk and groups != "full":
        pytest.skip("there is no disk below several KV groups")
    make = on_disk if has_disk else tiered
    engine = make(async_scheduling=async_scheduling, groups=groups)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    if has_disk:
        fill_dram(engine)
    happens(engine)
    run_turn(engine, "other", 20, seed=5)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, num_loaded)
    found = engine.kv_transfer_params["b"]["continuum"]["cached_tokens"]
    *nearer, last = engine.connector.side.tier.names
    assert found == {"vram": 0, **dict.fromkeys(nearer, 0), last: num_loaded}
    assert total(engine, "hit_tokens", last) == num_loaded
    assert answers_as_without_a_tier(engine)
    outlast_pins(engine)
    come_to_rest(engine)
    assert_drained(engine)


def test_a_copy_that_hangs_takes_down_only_the_tier_that_it_is_of(with_tier: str) -> None:
    engine = tiered(num_slots=50, timeout_s=2.0)  # ten of them are DRAM's, if any
    run_turn(engine, "a", 200, program="p")
    park(engine)
    engine.worker.cancels_late = True
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    for seconds in (3.0, HANGS_AFTER_S):
        engine.clock.advance(seconds)
        for _ in range(12):
            engine.step()
    tier = engine.connector.side.tier
    assert "hangs: begun 6" in tier.down_reason
    assert tier.is_up is (with_tier == "dram and shelf")
    hold(engine, False)
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_tier_that_is_reset_leaves_the_copies_of_another_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "make_tier", pretend_tiers.make_both)
    engine = tiered(num_slots=100)  # 20 are DRAM's
    hold(engine)
    run_turn(engine, "a", 200, program="p", idle=False)
    to_dram, to_shelf = in_flight(engine, Kind.STORE)
    engine.connector.side.tier.near.reset()
    assert (to_dram.hold, to_dram.state.name) == (None, "ABANDONED")
    assert to_shelf.hold is not None
    hold(engine, False)
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (0, 208)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@pytest.mark.usefixtures("with_tier")
def test_the_machine_runs_over_any_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "may_have_disk", False)
    run_briefly()
