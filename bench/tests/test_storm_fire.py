"""bench/storm: what it fires."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.serve.apis import APIS
from bench.storm.agents import Force, Storm
from bench.storm.garbage import BODIES, PLACES, VALUES, encode, put, spoil
from bench.storm.plan import WHO, draw_agent

FROM_NOBODY: Any = None  # a server that is never asked


def test_equal_seeds_fire_equal_agents_and_every_kind_of_them_comes() -> None:
    agents = [draw_agent(1, number) for number in range(400)]
    assert agents == [draw_agent(1, number) for number in range(400)]
    assert agents[0] != draw_agent(2, 0)
    assert {agent.api for agent in agents} == set(APIS)
    assert {agent.who for agent in agents} == set(WHO)
    turns = [turn for agent in agents for turn in agent.turns]
    for kind in ("forks", "compacts", "abort_s", "spoiled", "hints"):
        assert any(getattr(turn, kind) for turn in turns)
    for name in ("stream", "n", "stop", "prompt_logprobs"):
        assert any(name in turn.fields for turn in turns)
    assert all(0.02 <= turn.abort_s <= 0.5 for turn in turns if turn.abort_s)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_any_value_can_be_put_into_any_place(place: tuple[str, ...]) -> None:
    for value in VALUES.values():
        body = {"model": "m", "kv_transfer_params": {"continuum": {"program": "p"}}}
        whole = json.dumps(body)
        changed = dict(body)
        put(changed, place, value)
        assert json.loads(encode(changed))["model"] == "m"
        assert json.dumps(body) == whole  # the agent's next turn is not spoiled


def test_what_was_spoiled_is_said_in_few_words() -> None:
    for seed in range(300):
        body: dict[str, object] = {}
        headers: dict[str, str] = {}
        said = spoil(random.Random(seed), body, headers)
        assert said
        assert body or headers
        assert len("".join(said)) < 400
    assert all(isinstance(body, bytes) for body in BODIES.values())


def test_resets_and_switches_fall_evenly_on_the_storms_quarters() -> None:
    storm = Storm(FROM_NOBODY, Force(400), Path("switch"))
    halves = [sum(low <= at < low + 100 for at, _ in storm._events) for low in (0, 100, 200, 300)]
    assert len(set(halves)) == 1
    assert not [1 for at, _ in storm._events if at >= 400]


def test_a_fault_of_the_storms_own_is_raised_wherever_it_was(tmp_path: Path) -> None:
    storm = Storm(FROM_NOBODY, Force(1), tmp_path / "switch")

    async def fault() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        storm.sent = 1  # over before it began
        storm._start(fault())
        await asyncio.sleep(0)
        await storm.run()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
