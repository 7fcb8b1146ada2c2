"""Windows: what is kept of models with sliding-window groups is what the next turn hits, and all
of it: vLLM's own lookup is the rule, and others take what room there is meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.vllm import coordinator
from tests.vllm.agents import AgentEngine, others_take_the_pool, play_under_pressure, whole
from tests.vllm.drafts import drafts_read
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    BLOCK,
    MODES,
    answers_as_without_a_tier,
    check,
    park,
    run_turn,
    tiered,
)

ANSWERS = pytest.mark.parametrize("answer", [3, 40, 100, 111])
LONG = {"ttl_s": 60}


def windowed(num_blocks: int = 300, **kwargs: Any) -> AgentEngine:
    """One full-attention group, two of windows; pins outlast what others do."""
    kwargs.setdefault("extra_config", LONG)
    return AgentEngine(num_blocks, groups="hybrid", max_num_batched_tokens=1024, **kwargs)


def groups_of(engine: Engine) -> KvGroups:
    groups: KvGroups = engine.connector.side.groups
    return groups


@MODES
@ANSWERS
def test_under_pressure_the_next_turn_hits_prompt_and_answer(
    async_scheduling: bool, answer: int
) -> None:
    engine = windowed(async_scheduling=async_scheduling)
    play_under_pressure(engine, answer)
    assert answers_as_without_a_tier(engine)


@MODES
@ANSWERS
def test_a_load_from_dram_brings_prompt_and_answer(async_scheduling: bool, answer: int) -> None:
    engine = tiered(groups="hybrid", async_scheduling=async_scheduling)
    run_turn(engine, "a", 300, max_tokens=answer, program="p")
    for turn, before in (("b", "a"), ("c", "b")):
        park(engine)
        tokens = engine.next_prompt(before, 20)
        run_turn(engine, turn, tokens, max_tokens=answer, program="p")
        assert engine.cached[turn] == (0, whole(engine, len(tokens) - 20))
        check(engine)
    assert answers_as_without_a_tier(engine)


@MODES
def test_a_pin_holds_what_the_next_turn_hits_and_no_block_more(async_scheduling: bool) -> None:
    engine = windowed(async_scheduling=async_scheduling)
    engine.run_turn("a", 500, max_tokens=100, program="p")
    held = set(engine.foreign_refs())
    assert len(held) == 599 // BLOCK + 2 * 4  # a window of 64 ends where the hit ends
    engine.add("b", engine.next_prompt("a", 200), program="p")
    engine.run_until_idle(until=lambda: "b" in engine.admissions)
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    found = {each.block_id for manager in managers for each in manager.req_to_blocks["b"]}
    assert held < found


def test_what_left_a_window_is_taken_out_of_the_free_queue() -> None:
    """A window that is no number of blocks is not kept while the turn runs where no allocation is
    ours, as with `scheduler` 0: then the prompt's own is the last that vLLM hashed, and it has left
    the turn."""
    engine = windowed(window=72)
    groups_of(engine).rule.gives_way = False
    in_turn: set[int] = set()
    finish = engine.connector.request_finished_all_groups

    def spy(request: Any, block_ids: Any) -> Any:
        in_turn.update(*block_ids)
        return finish(request, block_ids)

    engine.connector.request_finished_all_groups = spy
    engine.run_turn("a", 500, max_tokens=124, program="p")  # 623 tokens have KV: 15 in a block
    if engine.scheduler.kv_cache_manager.coordinator.retention_interval is None:
        pytest.skip("this vLLM hashes every window")
    left = {block for block in engine.foreign_refs() if block not in in_turn}
    assert len(left) == 2 * 5
    others_take_the_pool(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (496, 0)
    assert answers_as_without_a_tier(engine, "b")


def decode_sizes(engine: Engine) -> set[int]:
    """Run a turn; return how many blocks of a window it held in the steps that decoded."""
    engine.add("a", 500, max_tokens=100, program="p")
    sizes = set()
    while engine.step():
        for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers[1:]:
            table = manager.req_to_blocks.get("a", ())
            if len(table) > 500 // BLOCK + 1:
                sizes.add(sum(not block.is_null for block in table))
    return sizes


@MODES
def test_a_running_turn_holds_no_more_than_vllm_reckons_with(async_scheduling: bool) -> None:
    engine = windowed(async_scheduling=async_scheduling)
    sizes = decode_sizes(engine)
    spec = engine.scheduler.kv_cache_config.kv_cache_groups[1].kv_cache_spec
    num_decoded = 1 + async_scheduling  # tokens of steps in flight
    assert max(sizes) <= spec.max_admission_blocks_per_request(num_decoded, 32_768)


def test_switched_off_windows_are_cut_as_vllm_cuts_them() -> None:
    smallest = []
    for is_on in (True, False):
        engine = windowed()
        engine.connector.side.switch(is_on, engine.clock())
        smallest.append(min(decode_sizes(engine)))
    assert smallest == [5, 4]


def test_a_turn_that_never_ran_keeps_nothing_of_what_others_left() -> None:
    engine = windowed()
    engine.run_turn("a", 300, program="p")
    request = engine.requests["a"]
    assert groups_of(engine).take_kept([[1], [], []], request)
    assert not groups_of(engine).take_kept([[], [], []], request)


def test_drafts_drop_a_block_of_the_next_hit_but_not_the_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts_read(monkeypatch, 0)
    engine = windowed()
    engine.run_turn("a", 500, max_tokens=100, program="p")
    hit = engine.pinned_blocks()
    others_take_the_pool(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    cached = engine.cached["b"][0]
    assert cached >= 480
    assert hit == cached // BLOCK + 2 * 4 + 1  # and the block behind it, which proves it


def test_the_engine_hashes_windows_as_a_server_does() -> None:
    engine = windowed()
    wanted = getattr(
        engine.vllm_config.cache_config, "prefix_cache_retention_interval", None
    )  # before 0.29 an environment variable, not set
    assert engine.scheduler.kv_cache_manager.coordinator.retention_interval == wanted
    assert isinstance(groups_of(engine).rule, coordinator.HitRule)
    assert groups_of(Engine(100)).rule is None  # one group of full attention: nothing to ask
