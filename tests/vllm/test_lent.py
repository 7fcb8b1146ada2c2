"""While a turn runs, what it goes on from is lent: it may leave DRAM before all that is live, for
VRAM has it too, and at its end the turn stores it anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from continuum_connector.policy.base import Choice, Free
from continuum_connector.scheduler.kv_groups import full_keys
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    MODES,
    answers_as_without_a_tier,
    come_to_rest,
    on_disk,
    park,
    run_turn,
    store_all,
    tiered,
    wind_down,
)

TOKENS = 200  # of a prompt; with its answer they fill 13 blocks
BLOCKS = 13


def ranked(num_slots: int = 2 * BLOCKS, **kwargs: Any) -> Engine:
    """DRAM for two turns, which leave it by what they are worth. All that may be kept is stored,
    and nothing is pinned."""
    config = {"policy": "adaptive"} | kwargs.pop("config", {})
    engine = tiered(num_slots=num_slots, config=config, max_num_seqs=16, **kwargs)
    store_all(engine)
    return engine


def two_in_dram(**kwargs: Any) -> Engine:
    """Of `a` and `b` DRAM has everything, and VRAM nothing; DRAM is full."""
    engine = ranked(**kwargs)
    for seed, name in enumerate("ab", 1):
        run_turn(engine, name, TOKENS, seed=seed, program=name)
    park(engine)
    assert [in_dram(engine, name) for name in "ab"] == [BLOCKS, BLOCKS]
    return engine


def begin(engine: Engine, name: str, **kwargs: Any) -> None:
    """The program's next turn runs, and goes on for long."""
    run(engine, name, engine.next_prompt(name[0], 8), name[0], **kwargs)


def run(engine: Engine, name: str, tokens: list[int] | int, program: str, **kwargs: Any) -> None:
    """A long turn of the program; returns once it runs."""
    engine.add(name, tokens, 200, program=program, **kwargs)
    engine.run_until_idle(until=lambda: bool(engine.outputs[name]))


def in_dram(engine: Engine, request_id: str) -> int:
    """How many of the blocks of that request, from its first on, DRAM has."""
    return len(engine.connector.side.tier.index.find(keys(engine, request_id)))


def keys(engine: Engine, request_id: str) -> list[bytes]:
    return full_keys(engine.requests[request_id].block_hashes)


def lent(engine: Engine) -> list[str]:
    """Whose chains are lent, in the order in which they leave."""
    order = engine.connector.side.tier.index.order
    return [chain.program.removeprefix("job:") for chain in reversed(order._lent)]


def others_store(engine: Engine) -> None:
    """Another program's turn ends, and takes the place of one chain in DRAM."""
    run_turn(engine, "c", TOKENS, seed=3, program="c", idle=False)
    engine.run_until_idle(until=lambda: in_dram(engine, "c") == BLOCKS)


@MODES
def test_what_a_turn_that_runs_goes_on_from_leaves_first_and_comes_back(
    async_scheduling: bool,
) -> None:
    engine = two_in_dram(async_scheduling=async_scheduling)
    begin(engine, "a2")
    assert lent(engine) == ["a"]
    others_store(engine)
    assert [in_dram(engine, name) for name in ("a", "b", "c")] == [0, BLOCKS, BLOCKS]
    assert engine.connector.side.tier.residence_s(engine.clock()) == math.inf, "nothing is lost"
    engine.run_until_idle()
    assert in_dram(engine, "a") == BLOCKS, "stored anew"
    assert lent(engine) == []
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_what_is_not_lent_stays_as_what_was_used_last() -> None:
    """The control: nothing but the rule makes it leave."""
    engine = two_in_dram()
    engine.connector.side._lends = False
    begin(engine, "a2")
    others_store(engine)
    assert in_dram(engine, "a") == BLOCKS
    engine.run_until_idle()
    wind_down(engine)


def test_of_two_that_run_the_one_that_began_last_gives_first() -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    begin(engine, "b2")
    assert lent(engine) == ["b", "a"]
    others_store(engine)
    assert [in_dram(engine, name) for name in "ab"] == [BLOCKS, 0]
    engine.run_until_idle()
    assert lent(engine) == []
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_prompt_without_the_thinking_at_its_end_goes_on_from_the_rest() -> None:
    engine = two_in_dram()
    run(engine, "a2", prompt(TOKENS, seed=1) + prompt(40, seed=5), "a")
    assert lent(engine) == ["a"]
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@pytest.mark.parametrize("num_same", [0, 100])
def test_one_name_for_unlike_turns_gives_up_nothing(num_same: int) -> None:
    engine = two_in_dram()
    run(engine, "a2", prompt(TOKENS, seed=1)[:num_same] + prompt(TOKENS, seed=7), "a")
    assert lent(engine) == []
    engine.run_until_idle()
    wind_down(engine)


def test_a_turn_that_finds_what_another_program_left_gives_up_nothing_of_its_own() -> None:
    engine = two_in_dram()
    run(engine, "a2", engine.next_prompt("b", 8), "a")
    assert engine.cached["a2"][1] == BLOCKS * 16
    assert lent(engine) == []
    engine.run_until_idle()
    wind_down(engine)


def test_a_turn_that_comes_beside_another_of_its_program_gives_up_nothing() -> None:
    engine = two_in_dram()
    run(engine, "agent", TOKENS, "a", seed=8)
    begin(engine, "a2")
    assert lent(engine) == []
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_what_vram_does_not_have_yet_is_not_lent() -> None:
    """It asks for the logprobs of its prompt, so it reads no cache."""
    engine = two_in_dram()
    engine.add("a2", engine.next_prompt("a", 8), 50, program="a", prompt_logprobs=1)
    engine.step()
    assert lent(engine) == []
    engine.run_until_idle()
    wind_down(engine)


@pytest.mark.parametrize("waits", [False, True])
def test_beside_another_turn_of_the_program_nothing_is_given_up(waits: bool) -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    assert lent(engine) == ["a"]
    engine.add("a3", prompt(TOKENS, seed=1)[:100], 100, program="a")
    for _ in range(0 if waits else 8):
        engine.step()
    assert bool(engine.outputs["a3"]) is not waits
    assert lent(engine) == []
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_what_another_turn_of_the_program_left_is_not_given_up() -> None:
    engine = ranked(num_slots=4 * BLOCKS)
    run_turn(engine, "a", TOKENS, seed=1, program="a")
    park(engine)
    begin(engine, "a2")
    run_turn(engine, "agent", TOKENS, seed=8, program="a", idle=False)  # ended, and is away
    engine.run_until_idle(until=lambda: in_dram(engine, "agent") == BLOCKS)
    assert lent(engine) == []
    run_turn(engine, "agent2", engine.next_prompt("agent", 8), program="a", idle=False)
    assert lent(engine) == []
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_turn_that_waits_gives_up_nothing() -> None:
    engine = two_in_dram()
    engine.add("a2", engine.next_prompt("a", 8), 100, program="a")
    assert lent(engine) == []
    engine.run_until_idle()
    wind_down(engine)


def test_a_compaction_gives_up_nothing() -> None:
    engine = two_in_dram()
    begin(engine, "a2", kv_transfer_params={"continuum": {"compaction": True}})
    assert lent(engine) == []
    engine.run_until_idle()
    wind_down(engine)


def test_a_turn_that_was_preempted_has_nothing_in_vram() -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    engine.connector.side.note_preempted("a2", engine.clock())
    assert lent(engine) == []
    others_store(engine)
    assert in_dram(engine, "a") == BLOCKS
    engine.abort("a2")
    engine.run_until_idle()
    order = engine.connector.side.tier.index.order
    assert [len(chain.tickets) for chain in order.live_of("job:a")] == [BLOCKS]
    wind_down(engine)


def went_away(engine: Engine) -> None:
    engine.abort("a2")


def is_not_worth_a_store(engine: Engine) -> None:
    policy = engine.connector.side.decider.policy
    policy.decide = lambda turn, _: Choice(Free(), "nobody expects it back")


@pytest.mark.parametrize("ends", [went_away, is_not_worth_a_store])
@MODES
def test_what_left_for_a_turn_that_is_not_stored_is_put_back(
    async_scheduling: bool, ends: Callable[[Engine], None]
) -> None:
    engine = two_in_dram(async_scheduling=async_scheduling)
    begin(engine, "a2")
    others_store(engine)
    assert not in_dram(engine, "a")
    assert engine.requests["a2"].num_computed_tokens > (BLOCKS + 1) * 16
    ends(engine)
    engine.run_until_idle()
    assert in_dram(engine, "a2") == BLOCKS, "no more than there was"
    park(engine)
    run_turn(engine, "again", engine.next_prompt("a", 8), program="a")
    assert engine.cached["again"][1] == BLOCKS * 16
    assert answers_as_without_a_tier(engine, "again", "c")
    wind_down(engine)


def asks_again(engine: Engine) -> None:
    engine.add("retry", engine.next_prompt("a", 8), 200, program="a")


def is_preempted(engine: Engine) -> None:
    engine.connector.side.note_preempted("a2", engine.clock())


@pytest.mark.parametrize("meanwhile", [asks_again, is_preempted])
def test_what_left_is_owed_until_the_turn_is_over(meanwhile: Callable[[Engine], None]) -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    others_store(engine)
    meanwhile(engine)
    engine.step()
    assert lent(engine) == []
    went_away(engine)
    for name in set(engine.requests) & {"retry"}:
        engine.abort(name)
    engine.run_until_idle()
    assert in_dram(engine, "a") == BLOCKS
    assert engine.connector.side.tier.index.order.loans == {}
    wind_down(engine)


def test_where_nothing_left_nothing_is_put_back() -> None:
    engine = two_in_dram()
    begin(engine, "a2")
    went_away(engine)
    engine.run_until_idle()
    assert lent(engine) == []
    order = engine.connector.side.tier.index.order
    assert [len(chain.tickets) for chain in order.live_of("job:a")] == [BLOCKS]
    wind_down(engine)


def test_a_last_turn_whose_client_went_away_leaves_nothing() -> None:
    engine = two_in_dram()
    begin(engine, "a2", final=True)
    others_store(engine)
    engine.abort("a2")
    engine.run_until_idle()
    assert not in_dram(engine, "a")
    wind_down(engine)


@pytest.mark.parametrize("groups", ["hybrid", "state"])
def test_windows_and_states_give_up_nothing(groups: str) -> None:
    """VRAM has the window or the state at the turn's own end, not those that DRAM has."""
    engine = ranked(num_slots=400, groups=groups)
    run_turn(engine, "a", TOKENS, seed=1, program="a")
    park(engine)
    begin(engine, "a2")
    assert lent(engine) == []
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


def test_a_disk_still_knows_how_many_turns_used_what_left_and_came_back() -> None:
    engine = on_disk(num_slots=2 * BLOCKS, config={"policy": "adaptive"})
    store_all(engine)
    disk = engine.connector.side.tier.below
    marks, disk.takes_all = disk.marks, lambda now: False  # so that nothing leaves but by its worth
    for seed, name in enumerate("ab", 1):
        run_turn(engine, name, TOKENS, seed=seed, program=name)
    park(engine)
    begin(engine, "a2")
    others_store(engine)
    assert not in_dram(engine, "a")
    assert marks.num_unsaved == 0, "nothing is lost"
    engine.run_until_idle()
    slots = engine.connector.side.tier.index.slots_of(keys(engine, "a2"))
    uses = marks.uses[slots[slots >= 0]].tolist()
    assert uses[:BLOCKS] == [2] * BLOCKS
    assert set(uses[BLOCKS:]) == {1}
    assert answers_as_without_a_tier(engine)
    come_to_rest(engine)
    wind_down(engine)
