"""People who chat: nobody is served noticeably later than by stock vLLM for pins of theirs."""

from __future__ import annotations

import pytest

from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine

NUM_PEOPLE = 3
SECONDS_PER_TOKEN = 1e-3  # 0.4 s for each turn here: long contexts, which are worth a pin


def chatting(engine: Engine) -> int:
    """Three people have had their answer, a long one is being written; somebody new comes.

    Returns the steps until that turn is admitted, which needs the room of what was kept.
    """
    for i in range(NUM_PEOPLE):
        engine.add(f"a{i}", 400, program=f"p{i}", seed=i)
        engine.run_until_idle()
    engine.add("long", 100, program="q", seed=8, max_tokens=300)
    for _ in range(5):
        engine.step()
    engine.add("new", 500, program="r", seed=9)
    return engine.run_until_idle(until=lambda: "new" in engine.admissions)


def people(num_blocks: int) -> AgentEngine:
    engine = AgentEngine(num_blocks, extra_config={"policy": "adaptive"})
    engine.connector.costs.prefill_s = lambda num_tokens, _=0: SECONDS_PER_TOKEN * num_tokens
    engine.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
    return engine


def test_a_newcomer_is_admitted_when_stock_admits_it() -> None:
    engine = people(100)
    num_steps = chatting(engine)
    assert engine.total("decisions", "pin") == NUM_PEOPLE
    assert num_steps <= chatting(Engine(100, connector=None)) + 3
    assert engine.ends()["pressure"] >= 1


def test_where_there_is_room_for_all_no_pin_gives_way() -> None:
    engine = people(300)
    assert chatting(engine) == chatting(Engine(300, connector=None))
    assert engine.num_pins() == NUM_PEOPLE


def test_the_first_pin_of_a_server_is_worth_no_more_than_the_next() -> None:
    engine = people(300)
    for number in range(3):
        engine.run_turn(f"a{number}", 400, seed=number)
    first, *others = (pin.value for pin in engine.side.retention.pins)
    assert others == pytest.approx([first] * 2, rel=0.1)


def test_a_server_of_one_shot_requests_soon_pins_none() -> None:
    """Each is pinned at first, as if its person might be back; a hundred seconds later it is
    known that it is not. Contexts are dear, but nobody returns to them."""
    engine = people(300)
    for number in range(40):
        engine.run_turn(f"a{number}", 300, seed=number)
        engine.clock.advance(100.0)
    pinned = engine.total("decisions", "pin")
    assert 0 < pinned < 20
    for number in range(40, 50):
        engine.run_turn(f"a{number}", 300, seed=number)
    assert engine.total("decisions", "pin") == pinned
    assert (engine.num_pins(), engine.usage()) == (0, 0)
