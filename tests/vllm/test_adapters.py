"""LoRA adapters: a turn that loads from DRAM keeps its adapter's place, and blocks nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from continuum_connector.scheduler import epochs
from tests.vllm.harness import Engine, adapter_named
from tests.vllm.tiering import MODES, hold, park, run_turn, tiered, wind_down

ONE, OTHER = adapter_named("one"), adapter_named("other")


def returning(max_loras: int = 1, **options: Any) -> Engine:
    """A turn of an adapter is back, and begins to load what DRAM has for it."""
    config = {"policy": "fixed_ttl", "ttl_s": 0.0, **options.pop("config", {})}
    engine = tiered(max_loras=max_loras, config=config, hold_transfers=True, **options)
    hold(engine, False)
    run_turn(engine, "before", 200, program="p", lora_request=ONE)
    park(engine)
    hold(engine)
    engine.add("back", engine.next_prompt("before", 20), program="p", lora_request=ONE)
    engine.step()
    return engine


def keep_coming(engine: Engine, num_steps: int, lora: Any = OTHER) -> int:
    """Three turns of an adapter are always there. Returns after how many steps the turn that is
    back says something, at most `num_steps`."""
    for number in range(num_steps):
        live = [r for r in engine.requests.values() if r.lora_request is lora]
        num_live = sum(not request.is_finished() for request in live)
        for new in range(len(live), len(live) + 3 - num_live):
            engine.add(f"new{new}", 40, 10 + 3 * (new % 3), seed=100 + new, lora_request=lora)
        engine.step()
        if engine.outputs["back"]:
            return number
    return num_steps


@MODES
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_turn_that_loads_keeps_its_adapters_place(async_scheduling: bool, policy: str) -> None:
    """Without that it would wait for as long as turns of another adapter keep coming."""
    engine = returning(async_scheduling=async_scheduling, policy=policy)
    assert keep_coming(engine, 5) == 5
    assert not any(engine.outputs[each] for each in engine.requests if each.startswith("new"))
    engine.settle()
    assert keep_coming(engine, 100) <= 5
    hold(engine, False)
    engine.settle()
    engine.run_until_idle()
    assert engine.cached["back"][1] > 0
    assert set(engine.finish_reasons.values()) == {"length"}
    wind_down(engine)


def test_whoever_takes_no_place_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of the same adapter, of none, and of another while there is a place."""
    engine = returning(max_loras=2)
    engine.add("base", 40)
    engine.add("same", 40, seed=1, lora_request=ONE)
    engine.add("second", 40, seed=2, lora_request=OTHER)
    engine.add("third", 40, seed=3, lora_request=adapter_named("third"))
    engine.add("later", 40, seed=4)
    engine.step()
    assert engine.admissions[-4:] == ["base", "same", "second", "later"]


@MODES
@pytest.mark.parametrize(
    ("sent", "is_found"),
    [
        (ONE, True),
        (LoRARequest("one", 7, ONE.lora_path), False),
        (LoRARequest("one", ONE.lora_int_id, "/adapters/step2"), False),
    ],
    ids=["the same", "another id", "another path"],
)
def test_a_turn_gets_nothing_of_another_adapter_that_had_its_name(
    async_scheduling: bool, sent: LoRARequest, is_found: bool
) -> None:
    """It asks for its KV before a worker reads the adapter, in the same step."""
    config = {"policy": "fixed_ttl", "ttl_s": 0.0}
    engine = tiered(max_loras=2, config=config, async_scheduling=async_scheduling)
    run_turn(engine, "before", 200, program="p", lora_request=ONE)
    park(engine)
    run_turn(engine, "after", 200, program="q", lora_request=sent)
    assert (engine.cached["after"][1] > 0) == is_found
    assert engine.connector.side.steps.epochs.number == int(not is_found)
    park(engine)
    run_turn(engine, "again", 200, program="r", lora_request=sent)
    assert engine.cached["again"][1] > 0
    assert engine.connector.side.steps.epochs.number == int(not is_found)
    wind_down(engine)


def test_two_api_servers_that_number_adapters_apart_begin_one_epoch() -> None:
    engine = tiered(max_loras=2)
    for number in range(6):
        sent = LoRARequest("one", 1 + number % 2, ONE.lora_path)
        run_turn(engine, f"r{number}", 100, seed=number, lora_request=sent)
    assert engine.connector.side.steps.epochs.number == 1


def test_names_beyond_the_bound_are_forgotten_with_all_that_they_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epochs, "_MAX_NAMES", 2)
    named = tiered(max_loras=2).connector.side.adapter_names
    said = [
        named.arrived(SimpleNamespace(lora_request=adapter_named(name) if name else None))
        for name in ("a", "b", "", "c", "d", "c")
    ]
    assert said == [False, False, False, True, False, False]


def test_a_trainer_that_numbers_its_steps_makes_no_name_grow() -> None:
    named = tiered(max_loras=2).connector.side.adapter_names
    for step in range(1000):
        sent = SimpleNamespace(lora_request=LoRARequest("policy", step + 1, "/adapters/policy"))
        assert named.arrived(sent) == (step > 0)
        assert not named.arrived(sent)
    assert len(named._named["policy"][1]) <= epochs._MAX_IDS


def test_who_is_passed_over_and_goes_away_waits_no_more() -> None:
    engine = returning()
    waits = engine.connector.side.waits
    engine.add("new", 40, 10, seed=7, lora_request=OTHER)
    engine.step()
    assert (list(waits.adapters), waits.are_due()) == (["new"], True)
    engine.abort("new")
    assert (list(waits.adapters), waits.are_due()) == ([], False)
    hold(engine, False)
    wind_down(engine)


def ends_by_abort(engine: Engine) -> None:
    engine.abort("back")


def ends_by_failure(engine: Engine) -> None:
    engine.fail()
    hold(engine, False)


def ends_by_switch(engine: Engine) -> None:
    engine.connector.switch.is_on = False


def ends_with_the_tier(engine: Engine) -> None:
    """As a load that hangs does."""
    engine.worker.report_tier_down("the driver does not answer")


@pytest.mark.parametrize(
    "end", [ends_by_abort, ends_by_failure, ends_by_switch, ends_with_the_tier]
)
def test_the_place_is_free_once_nobody_loads_for_it(end: Any) -> None:
    engine = returning()
    engine.add("other", 40, lora_request=OTHER)
    for _ in range(3):
        engine.step()
    assert "other" not in engine.admissions
    end(engine)
    engine.run_until_idle(max_steps=40, until=lambda: bool(engine.outputs["other"]))
    hold(engine, False)
    engine.settle()
    engine.run_until_idle()
    wind_down(engine)


def test_turns_without_a_place_are_no_backlog() -> None:
    """Servers that throttle prefills go on doing so: these wait because we hide them."""
    engine = returning()
    engine.add("other", 40, lora_request=OTHER)
    engine.step()
    if not hasattr(engine.scheduler, "deferred_waiting"):
        pytest.skip("this vLLM asks our queue instead")
    assert not engine.scheduler.prefill_capacity_bound
