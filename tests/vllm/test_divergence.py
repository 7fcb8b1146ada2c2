"""A prompt that goes on with its conversation behind text that has changed finds nothing that was
kept: a clock in the system prompt, tools in another order. After the second such turn in a row
nobody pays for it, until a turn continues again; the answer says where the prompts differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from bench.common.known_costs import know
from tests.vllm.harness import Engine, prompt
from tests.vllm.machine_draws import COSTS
from tests.vllm.tiering import check, tiered, total

SYSTEM = prompt(96, seed=7)  # six blocks
POLICIES = pytest.mark.parametrize("policy", ["adaptive", "fixed_ttl"])


def ours(num_slots: int = 200, policy: str = "fixed_ttl", num_blocks: int = 200) -> Engine:
    engine = tiered(num_blocks, num_slots, config={"policy": policy})
    know(engine.connector.costs, COSTS["both"])
    return engine


class Agent:
    """A conversation under one id, whose system prompt tells the time after `at` tokens."""

    _names = itertools.count()

    def __init__(self, engine: Engine, at: int = 40, num_answer: int = 20, task: int = 1) -> None:
        self._engine, self._at, self._num_answer = engine, at, num_answer
        self.history = prompt(160, seed=task)
        self._number = 0

    def turn(self, clock: int | None, **more: Any) -> dict[str, Any]:
        """A turn runs to its end; returns what its client is told, `found` with it."""
        self._number += 1
        time = [] if clock is None else prompt(4, seed=10_000 + clock)
        system = [*SYSTEM[: self._at], *time, *SYSTEM[self._at :]]
        return self.ask([*system, *self.history], **more)

    def ask(self, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        name = f"r{next(self._names)}"
        self._engine.add(name, list(tokens), self._num_answer, program="agent", **more)
        self._engine.run_until_idle()
        if self._engine.connector is None:
            self._engine.clock.advance(0.5)
        else:
            self._engine.idle(0.5)
        self.history += self._engine.outputs[name] + prompt(20, seed=500 + self._number)
        told = (self._engine.kv_transfer_params.get(name) or {}).get("continuum", {})
        return {**told, "found": sum(self._engine.cached[name])}


def side_request(engine: Engine, seed: int, num: int = 70) -> str:
    name = f"side{seed}"
    engine.add(name, prompt(num, seed=seed), 6, program="agent")
    engine.run_until_idle()
    engine.idle(0.1)
    return str(engine.kv_transfer_params[name]["continuum"]["decision"])


@POLICIES
@pytest.mark.parametrize("num_slots", [200, 0], ids=["dram", "vram"])
@pytest.mark.parametrize("num_answer", [20, 6], ids=["long answers", "short"])
@pytest.mark.parametrize("at", [40, 0], ids=["inside", "first"])
def test_a_clock_in_the_system_prompt_is_paid_for_twice(
    policy: str, num_slots: int, num_answer: int, at: int
) -> None:
    engine = ours(num_slots, policy)
    agent = Agent(engine, at, num_answer)
    told = [agent.turn(clock) for clock in range(2)]
    assert all(each["decision"] != "free" for each in told)
    stored, pinned = total(engine, "stored_blocks"), total(engine, "pins_started")
    told += [agent.turn(clock) for clock in range(2, 6)]
    assert [each["decision"] for each in told[2:]] == ["free"] * 4
    assert (total(engine, "stored_blocks"), total(engine, "pins_started")) == (stored, pinned)
    assert total(engine, "diverged_turns") == 5
    check(engine)


def test_the_answer_says_where_the_prompts_differ() -> None:
    agent = Agent(ours())
    told = [agent.turn(clock) for clock in range(3)]
    assert "diverged" not in told[0]
    num_tokens = [100 + 160 + turn * 40 for turn in range(3)]
    first, second = told[1]["diverged"], told[2]["diverged"]
    assert first == {"in_a_row": 1, "from": 0, "to": num_tokens[1], "of": num_tokens[1]}
    assert second == {"in_a_row": 2, "from": 32, "to": 48, "of": num_tokens[2]}


def test_the_answer_says_which_part_of_the_request_differs() -> None:
    agent = Agent(ours())
    said = {"program": "agent", "source": "job_id"}  # as the middleware sends it
    told = []
    for clock in range(3):
        parts = f"{7:08x}{clock:08x}{9:08x}"
        told.append(agent.turn(clock, kv_transfer_params={"continuum": {**said, "parts": parts}}))
    assert "part" not in told[1]["diverged"]
    assert told[2]["diverged"]["part"] == "system"


@POLICIES
def test_the_first_turn_that_continues_brings_it_back(policy: str) -> None:
    engine = ours(policy=policy)
    agent = Agent(engine)
    assert [agent.turn(clock)["decision"] for clock in range(4)][2:] == ["free"] * 2
    back = agent.turn(3)  # the clock stands still
    assert back["decision"] != "free"
    assert "diverged" not in back
    again = agent.turn(4)  # and once is an edit
    assert again["decision"] != "free"
    assert again["diverged"]["in_a_row"] == 1


@POLICIES
def test_an_agent_with_side_requests_is_always_paid_for(policy: str) -> None:
    engine = ours(policy=policy)
    agent = Agent(engine)
    for number in range(6):
        assert agent.turn(None)["decision"] != "free"
        for seed in (100 + number, 200 + number):
            side_request(engine, seed)
    # Requests that repeat the conversation behind another system prompt: titles, follow-ups.
    for _ in range(3):
        for other in range(3):
            agent_history = list(agent.history)
            told = agent.ask([*prompt(50, seed=900 + other), *agent_history])
            assert told["decision"] != "free"
            agent.history = agent_history
        assert agent.turn(None)["decision"] != "free"
    check(engine)


def test_conversations_under_one_id_are_always_paid_for() -> None:
    """They share a system prompt, and each begins with more than the one before."""
    engine = ours(600, num_blocks=600)
    talks = [Agent(engine, task=100 + number) for number in range(6)]
    for number, talk in enumerate(talks):
        talk.history += prompt(40 * number, seed=200 + number)
    for talk in [*talks, *talks]:
        assert talk.turn(None)["decision"] != "free"


def test_a_clock_is_seen_between_side_requests() -> None:
    engine = ours()
    agent = Agent(engine)
    decisions = []
    for clock in range(4):
        decisions.append(agent.turn(clock)["decision"])
        assert side_request(engine, 300 + clock) != "free"
    assert decisions[2:] == ["free"] * 2


@pytest.mark.parametrize("beside", ["less than a block", "the same", "a sub-agent"])
def test_what_else_continues_under_its_id_does_not_hide_a_clock(beside: str) -> None:
    engine = ours()
    agent = Agent(engine)
    sub = Agent(engine, task=50)
    decisions = []
    for clock in range(5):
        decisions.append(agent.turn(clock)["decision"])
        if beside == "a sub-agent":
            told = sub.turn(None)
            assert told["decision"] != "free"
            assert clock == 0 or told["found"] > 200
        else:
            side_request(engine, 300, 70 if beside == "the same" else 8)
    assert decisions[2:] == ["free"] * 3


def test_another_conversation_behind_a_clock_counts_for_itself() -> None:
    engine = ours(400)
    first, second = Agent(engine), Agent(engine, task=50)
    decisions = [each.turn(clock)["decision"] for clock in range(2) for each in (first, second)]
    assert "free" not in decisions
    assert [each.turn(2)["decision"] for each in (first, second)] == ["free"] * 2
    assert first.turn(2)["decision"] != "free"  # its clock stands still
    assert second.turn(3)["decision"] == "free"


def test_it_finds_what_it_finds_in_stock() -> None:
    def found(engine: Engine) -> list[int]:
        agent = Agent(engine)
        return [agent.turn(clock)["found"] for clock in range(6)]

    assert found(ours(0)) == found(Engine(200, connector=None))


def test_one_edit_of_a_context_is_paid_for() -> None:
    agent = Agent(ours())
    agent.turn(None)
    assert agent.turn(None)["decision"] != "free"
    agent.history[:20] = prompt(16, seed=77)
    told = agent.turn(None)
    assert told["decision"] != "free"
    assert agent.turn(None)["found"] > 200


@pytest.mark.parametrize("policy", ["adaptive", "fixed_ttl"])
def test_what_such_prompts_share_is_still_kept_below_vram(policy: str) -> None:
    """A clock behind much text that stays: with its id the agent finds no less than without."""

    def found(engine: Engine, named: bool) -> int:
        system, history, num_found = prompt(480, seed=7), prompt(100, seed=1), 0
        for number in range(10):
            time = prompt(4, seed=10_000 + number)
            asked = [*system[:320], *time, *system[320:], *history]
            name = f"m{number}"
            engine.add(name, asked, 6, program="agent" if named else None)
            engine.run_until_idle()
            num_found += sum(engine.cached[name])
            history += engine.outputs[name] + prompt(60, seed=500 + number)
            engine.idle(0.3)
            for other in range(8):  # the others have all of VRAM
                engine.add(f"o{number}.{other}", 280, 6, seed=100 + 10 * number + other)
                engine.run_until_idle()
                engine.idle(0.2)
        assert not named or total(engine, "diverged_turns") == 7  # the first two share half
        return num_found

    there = found(ours(120, policy, 120), False)
    assert found(ours(120, policy, 120), True) >= there > 0
