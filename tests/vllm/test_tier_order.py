"""Who leaves DRAM first, as the scheduler side asks for it."""

from __future__ import annotations

import math
from typing import Any

from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    answers_as_without_a_tier,
    park,
    run_turn,
    tiered,
    total,
    wind_down,
)


def test_an_answer_that_comes_back_anew_leaves_what_it_superseded_to_others_first() -> None:
    engine = tiered(num_slots=7 + 19 + 6)
    run_turn(engine, "z", 100, seed=5, program="z")  # 7 blocks, colder than the other's
    run_turn(engine, "a", 200, max_tokens=100, program="p")  # 12 and 6 of the answer
    run_turn(engine, "b", prompt(200) + prompt(60, seed=8), program="p")  # 12 and 5
    park(engine)  # no pin is left that would store again what has left
    run_turn(engine, "c", 110, seed=3, program="q")  # 7, of which two are free
    park(engine)
    run_turn(engine, "z2", engine.next_prompt("z", 20), program="z")
    assert engine.cached["z2"][1] == 7 * 16
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_turns_of_one_program_at_once_do_not_supersede_each_other() -> None:
    engine = tiered(num_slots=7 + 13 + 13 + 9)
    engine.add("long", 40, max_tokens=120, seed=9, program="p")  # under way all the time
    run_turn(engine, "z", 100, seed=5, program="z", idle=False)  # 7
    run_turn(engine, "one", 200, seed=1, program="p", idle=False)  # 13
    run_turn(engine, "two", 200, seed=2, program="p", idle=False)  # 13
    assert "long" not in engine.finish_reasons
    order = engine.connector.side.tier.index._claims.order
    assert sorted(len(chain.tickets) for chain in order.current("job:p")) == [13, 13]
    engine.run_until_idle()  # `long` is the last of them, and continues neither
    assert sorted(len(chain.tickets) for chain in order.current("job:p")) == [9, 13, 13]
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def is_p(program: str, _last_used: float) -> float:
    return float(program == "job:p")


def test_what_is_worth_less_than_all_that_is_there_is_refused_and_counted() -> None:
    engine = tiered(num_slots=15)
    tier = engine.connector.side.tier
    asked: list[float] = []

    def rank_at(now: float) -> Any:
        asked.append(now)
        return is_p

    tier.rank_at = rank_at
    run_turn(engine, "a", 200, program="p")  # 13
    run_turn(engine, "b", 100, seed=2, program="q")  # 7 blocks, two free
    assert (total(engine, "dram_refused_blocks"), total(engine, "dram_evicted_blocks")) == (5, 0)
    assert 0 < max(asked) <= engine.clock.now
    assert tier.residence_s(engine.clock.now) == math.inf
    tier.rank_at = None
    run_turn(engine, "c", 100, seed=3, program="r")
    assert total(engine, "dram_evicted_blocks") == 7
    assert tier.residence_s(engine.clock.now) < math.inf
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def asked_with(engine: Engine) -> list[bool]:
    """Whether DRAM took stores, as the policy is told each time it is asked from now on."""
    asked: list[bool] = []
    policy = engine.connector.side.decider.policy
    decide = policy.decide

    def told(turn: Any, snapshot: Any) -> Any:
        asked.append(snapshot.takes_store)
        return decide(turn, snapshot)

    policy.decide = told
    return asked


def test_a_turn_that_dram_refuses_is_decided_again_and_one_whose_tail_it_refuses_is_not() -> None:
    engine = tiered(num_slots=15)
    engine.connector.side.tier.rank_at = lambda now: is_p
    asked = asked_with(engine)
    run_turn(engine, "a", 200, program="p")  # 13 of 15 slots
    assert asked == [True]
    run_turn(engine, "b", 100, seed=2, program="q")  # 7 blocks, room for two
    assert asked == [True, True, False]
    run_turn(engine, "a2", engine.next_prompt("a", 60), program="p")  # 5 more blocks
    assert asked == [True, True, False, True]
    assert answers_as_without_a_tier(engine)
    wind_down(engine)
