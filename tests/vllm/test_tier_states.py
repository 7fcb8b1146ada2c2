"""The DRAM tier of models with states, chunks, windows and blocks of several sizes: a turn comes
back to where vLLM's own lookup would resume it, and answers as without a tier."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.kv_groups import STATE, KvGroup
from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm.drafts import drafts_read
from tests.vllm.harness import Engine, OracleError, prompt
from tests.vllm.tiering import (
    MODES,
    RANKS,
    answers_as_without_a_tier,
    check,
    hold,
    in_flight,
    park,
    reference,
    run_turn,
    tiered,
    total,
    wind_down,
)

KINDS = pytest.mark.parametrize("groups", ["state", "chunked", "hybrid", "mixed"])
ANSWERS = pytest.mark.parametrize("answer", [3, 40, 111])


def next_hit(engine: Engine, request_id: str) -> int:
    """Where vLLM would resume the next turn, if all that was hashed stayed."""
    groups = engine.connector.side.groups
    request = engine.requests[request_id]
    return int(groups.take_kept([[1]] + [[]] * (len(groups) - 1), request).end)


@MODES
@KINDS
@ANSWERS
@RANKS
def test_a_turn_comes_back_to_where_vllm_would_resume_it(
    async_scheduling: bool, groups: str, answer: int, world_size: int
) -> None:
    engine = tiered(groups=groups, async_scheduling=async_scheduling, world_size=world_size)
    run_turn(engine, "a", 300, max_tokens=answer, program="p")
    for turn, before in (("b", "a"), ("c", "b")):
        hit = next_hit(engine, before)
        assert hit > 0
        park(engine)
        run_turn(engine, turn, engine.next_prompt(before, 20), max_tokens=answer, program="p")
        assert engine.cached[turn] == (0, hit)
        check(engine)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
@KINDS
def test_programs_under_pressure_answer_as_without_a_tier(
    async_scheduling: bool, groups: str
) -> None:
    """Forks, evictions from a small DRAM and partial hits in VRAM, all at once."""
    engine = tiered(80, 130, groups=groups, async_scheduling=async_scheduling)
    for turn in range(4):
        for i in range(6):
            tokens = prompt(90 + 30 * i, seed=i % 3)
            if turn:
                tokens = engine.next_prompt(f"{i}.{turn - 1}", 20, seed=turn)
            if turn == 2 and i % 2:
                tokens = tokens[: -40 - 10 * i] + prompt(30, seed=i)
            engine.add(f"{i}.{turn}", tokens, 20 + 7 * i, program=f"p{i}")
        engine.run_until_idle()
        check(engine)
    assert engine.worker.num_blocks_loaded > 0
    assert total(engine, "dram_evicted_blocks") > 0
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@pytest.mark.parametrize("of", ["states", "blocks"])
def test_slots_that_are_swapped_fail_the_oracle(of: str) -> None:
    """The negative control: a wrong state, even another request's right one, is not overlooked."""
    engine = tiered(groups="state")
    for name, seed in (("a", 0), ("z", 1)):
        run_turn(engine, name, 200, seed=seed, program=name)
    park(engine)
    dram = engine.worker.dram
    is_state = {group.index: group.kind == STATE for group in engine.groups}
    some = [slot for slot, held in dram.items() if is_state[held.group] is (of == "states")]
    first, last = some[0], some[-1]
    dram[first], dram[last] = dram[last], dram[first]
    engine.add("b", engine.next_prompt("a", 20), program="a")
    with pytest.raises(OracleError, match="b reads wrong KV"):
        engine.run_until_idle()


@MODES
def test_a_load_on_top_of_a_partial_hit_brings_only_what_vram_lost(async_scheduling: bool) -> None:
    engine = tiered(groups="state", async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    run_turn(engine, "b", engine.next_prompt("a", 100), program="p")
    hit = next_hit(engine, "b")
    park(engine)
    run_turn(engine, "x", prompt(150), program="q")  # what it computes anew vLLM hits
    before = engine.worker.num_blocks_loaded
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    in_vram, loaded = engine.cached["c"]
    assert in_vram > 0
    assert in_vram + loaded == hit
    assert engine.worker.num_blocks_loaded - before == loaded // 16 + 2
    assert answers_as_without_a_tier(engine)


@MODES
def test_slots_that_were_corrupt_are_a_miss_until_the_turn_is_stored_again(
    async_scheduling: bool,
) -> None:
    engine = tiered(groups="state", async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    hit = next_hit(engine, "a")
    park(engine)
    hold(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    engine.fail()
    hold(engine, False)
    engine.run_until_idle()
    assert engine.cached["b"][1] in (0, hit)  # as told at the first admission
    assert answers_as_without_a_tier(engine)
    again = next_hit(engine, "b")
    park(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    assert engine.cached["c"] == (0, again)
    assert answers_as_without_a_tier(engine)
    check(engine)


def test_what_left_between_the_promise_and_the_load_is_a_miss() -> None:
    engine = tiered(groups="state")
    run_turn(engine, "a", 200, program="p")
    park(engine)
    tier = engine.connector.side.tier
    take = tier._found.take

    def taken(request: Any, block_ids: Any, num_tokens: int) -> Any:
        tier._found.take = take
        tier.index.clear()
        return take(request, block_ids, num_tokens)

    tier._found.take = taken
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert total(engine, "loads", "failed") == 1
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
def test_a_tier_too_small_for_a_turn_keeps_nothing_of_it(async_scheduling: bool) -> None:
    engine = tiered(num_slots=8, groups="state", async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    assert engine.worker.num_blocks_stored == 0
    run_turn(engine, "z", 80, seed=5, program="z")  # five blocks and two states
    assert engine.worker.num_blocks_stored == 7
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    run_turn(engine, "y", engine.next_prompt("z", 20), program="z")
    assert (engine.cached["b"], engine.cached["y"]) == ((0, 0), (0, 80))
    assert answers_as_without_a_tier(engine)


@MODES
@ANSWERS
def test_a_turn_comes_back_to_amid_a_block(async_scheduling: bool, answer: int) -> None:
    """With --prefix-match-unit hits end at hashes finer than blocks: what lies there is a copy that
    vLLM made of a block in use, or the block of a turn that is over."""
    cache = {"prefix_match_unit": 4}
    engine = tiered(groups="state", async_scheduling=async_scheduling, cache=cache)
    for worker in engine.workers:
        worker.keeps_tails = True
    run_turn(engine, "a", 300, max_tokens=answer, program="p")
    is_amid = []
    for turn, before in (("b", "a"), ("c", "b"), ("d", "c")):
        hit = next_hit(engine, before)
        is_amid.append(bool(hit % 16))
        park(engine)
        run_turn(engine, turn, engine.next_prompt(before, 21), max_tokens=answer, program="p")
        assert engine.cached[turn] == (0, hit)
        check(engine)
    assert any(is_amid) is (answer < 16)
    assert answers_as_without_a_tier(engine)
    wind_down(engine)


@MODES
@pytest.mark.parametrize("num_said", [5, 9])
def test_a_state_that_another_turn_goes_on_from_in_place_is_not_stored(
    async_scheduling: bool, num_said: int
) -> None:
    """A turn ends while another one, whose prompt is what it had said but for its last word, has
    its tail in a state that the next step computes on (vLLM moves the hash to a copy then)."""
    cache = {"prefix_match_unit": 4}
    said = reference(prompt(294), num_said)
    for num_left in (1, 2, 3):
        engine = tiered(groups="state", async_scheduling=async_scheduling, cache=cache)
        engine.worker.keeps_tails = True
        engine.add("a", 294, max_tokens=num_said, program="p")
        while len(engine.outputs["a"]) < num_said - num_left:
            engine.step()
        engine.add("b", prompt(294) + said[:-1], max_tokens=20, program="q")
        engine.run_until_idle()
        park(engine)
        run_turn(engine, "c", engine.next_prompt("a", 20), program="p")
        assert engine.cached["c"][1] >= 292
        assert answers_as_without_a_tier(engine)


@MODES
@pytest.mark.parametrize("groups", ["full", "state", "hybrid", "mixed"])
def test_of_what_drafts_read_a_load_brings_a_block_less_than_is_there(
    monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, groups: str
) -> None:
    drafts_read(monkeypatch, 0)
    engine = tiered(groups=groups, async_scheduling=async_scheduling)
    size = engine.groups[0].block_size
    run_turn(engine, "a", 300, max_tokens=40, program="p")
    for turn, before in (("b", "a"), ("c", "b")):
        stored = next_hit(engine, before) if groups != "full" else 0
        end = stored or (engine.requests[before].num_tokens - 1) // size * size
        park(engine)
        run_turn(engine, turn, engine.next_prompt(before, 20), max_tokens=40, program="p")
        assert engine.cached[turn] == (0, end - size)
        check(engine)
    assert answers_as_without_a_tier(engine)


def test_what_a_turn_is_worth_is_what_its_next_turn_need_not_compute() -> None:
    """Of large blocks that is far less than all its tokens; room is counted in blocks."""
    groups = KvGroup(0, 256), KvGroup(1, 256, STATE), KvGroup(2, 256, STATE)
    engine = Engine(40, groups=groups, max_num_batched_tokens=2048)
    engine.connector.costs.prefill_s = lambda num_tokens, _=0: float(num_tokens)
    decide, turns = engine.connector.side.decider.policy.decide, []
    engine.connector.side.decider.policy.decide = lambda turn, world: (
        turns.append(turn) or decide(turn, world)
    )
    run_turn(engine, "a", 1000, max_tokens=8, program="p")
    assert (turns[-1].num_blocks, turns[-1].prefill_s) == (3 + 2, 768.0)
