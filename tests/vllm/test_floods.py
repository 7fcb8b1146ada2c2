"""Floods of new programs: what never came back is forgotten first, and what is forgotten ranks in
DRAM by its last use."""

from __future__ import annotations

from typing import Any

import pytest

from bench.common.known_costs import know
from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.harness import Engine
from tests.vllm.tiering import check, tiered

# To compute is slow, to load is not.
COSTS: dict[str, Any] = {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-6]}


def beside_a_flood(max_programs: int, named: bool = False) -> tuple[int, Engine]:
    """What an agent finds beside 25 questions between two of its turns, six blocks each."""
    config = {"policy": "adaptive", "max_programs": max_programs}
    engine = tiered(60, 120, max_num_batched_tokens=4096, config=config)
    know(engine.connector.costs, COSTS)
    engine.connector.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
    found = 0
    for turn in range(3):
        tokens = engine.next_prompt(f"a{turn - 1}", 32) if turn else 640
        ran = {"this_func_call": "make"}
        engine.add(f"a{turn}", tokens, 4, seed=1, program="agent", extra_args=ran)
        engine.run_until_idle()
        found += sum(engine.cached[f"a{turn}"])
        engine.idle(1.0)
        for number in range(25):
            name = f"f{turn}.{number}"
            seed = 1000 * turn + 100 + number
            engine.add(name, 100, 2, seed=seed, program=name if named else None)
            engine.run_until_idle()
            engine.idle(0.1)
    check(engine)
    return found, engine


@pytest.mark.parametrize("named", [False, True], ids=["questions", "new names"])
def test_more_new_programs_than_are_remembered_take_nothing_from_an_agent(named: bool) -> None:
    roomy, _ = beside_a_flood(10_000, named)
    crowded, engine = beside_a_flood(20, named)
    assert roomy == crowded > 1200
    assert len(engine.connector.side.programs) <= 20


def test_a_flood_of_questions_does_not_make_us_forget_an_agent() -> None:
    _, engine = beside_a_flood(20)
    programs, away = engine.connector.side.programs, engine.connector.side.decider.away
    agent = programs.get("job:agent")
    assert agent is not None
    assert agent.num_turns == 3
    assert away.forecast_of("job:agent") is not None


def test_the_pin_of_a_program_that_is_forgotten_gives_way_first() -> None:
    """Else what nobody can be seen to come back for stays, as it was worth most when it began."""
    engine = tiered(60, 0, config={"policy": "adaptive", "max_programs": 8})
    know(engine.connector.costs, COSTS)
    calls = {"this_func_call": "make"}
    for number in range(12):
        length = 20 if number else 320
        engine.add(f"r{number}", length, 4, seed=number, program=f"p{number}", extra_args=calls)
        engine.run_until_idle()
    side = engine.connector.side
    worth = {pin.program: side.decider.worth_now(pin, engine.clock()) for pin in side.pins}
    assert worth["job:p0"] == 0.0 < min(worth[f"job:p{number}"] for number in range(4, 12))
    engine.add("new", 480, 4, seed=99)
    engine.run_until_idle()
    assert "job:p0" not in side.pins
    assert "job:p11" in side.pins
