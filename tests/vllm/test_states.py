"""States, chunks, windows and blocks of several sizes: what is pinned of a turn is what the next
one hits, and all of it, though others take what room there is while it runs and afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_connector.scheduler.kv_groups import FULL, STATE, WINDOW, KvGroup, KvGroups
from tests.vllm.agents import AgentEngine, others_take_the_pool, play_under_pressure, whole
from tests.vllm.drafts import drafts_read
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import MODES, answers_as_without_a_tier, park, run_turn, tiered

KINDS = pytest.mark.parametrize("groups", ["state", "chunked", "hybrid", "mixed"])
# As servers have it, and every block hashed.
RETENTION = pytest.mark.parametrize("cache", [{}, {"prefix_cache_retention_interval": None}])


def engine_of(groups: Any, num_blocks: int = 300, **kwargs: Any) -> AgentEngine:
    """Pins outlast what others do."""
    kwargs.setdefault("extra_config", {"ttl_s": 60})
    kwargs.setdefault("max_num_batched_tokens", 1024)
    return AgentEngine(num_blocks, groups=groups, **kwargs)


def size_of(engine: Engine) -> int:
    groups: KvGroups = engine.connector.side.groups
    return groups.scheduler_size


def managers(engine: Engine) -> Any:
    return engine.scheduler.kv_cache_manager.coordinator.single_type_managers


def tables(engine: Engine, request_id: str) -> set[int]:
    """The blocks that a request holds, of all groups."""
    held = [block for each in managers(engine) for block in each.req_to_blocks.get(request_id, ())]
    return {block.block_id for block in held if not block.is_null}


@MODES
@KINDS
@RETENTION
@pytest.mark.parametrize("answer", [3, 100])
def test_under_pressure_the_next_turn_hits_prompt_and_answer(
    async_scheduling: bool, groups: str, cache: dict[str, Any], answer: int
) -> None:
    engine = engine_of(groups, async_scheduling=async_scheduling, cache=cache)
    play_under_pressure(engine, answer)
    assert answers_as_without_a_tier(engine)


@MODES
@pytest.mark.parametrize("groups", ["state", "hybrid"])
@pytest.mark.parametrize("grows", [False, True], ids=["questions of a text", "reminders"])
@pytest.mark.parametrize("num_slots", [0, 400], ids=["vram", "dram"])
def test_who_departs_from_each_prompt_finds_where_it_departed(
    async_scheduling: bool, groups: str, grows: bool, num_slots: int
) -> None:
    """It asks one question after the other of a text, or each of its requests ends in a reminder
    that the next one lacks. vLLM keeps a state where a prompt departs from one before."""
    if num_slots:
        engine: Any = tiered(groups=groups, async_scheduling=async_scheduling)
    else:
        engine = engine_of(groups, async_scheduling=async_scheduling)
    history, ends = prompt(300), []
    for number in range(3):
        name, tokens = f"a{number}", [*history, *prompt(40, seed=50 + number)]
        run_turn(engine, name, tokens, program="p")
        ends.append(whole(engine, len(history) + 1))
        if grows:
            history += [*engine.outputs[name], *prompt(32, seed=70 + number)]
        if not num_slots:
            others_take_the_pool(engine, seed=90 + 20 * number)
            others_take_the_pool(engine, seed=100 + 20 * number)
        else:
            park(engine)
    assert sum(engine.cached["a2"]) == ends[0]
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("state", [240, 288, 400, 448, 496]),
        ("hybrid", [288, 336, 400, 448, 496]),
    ],
)
def test_who_departs_within_a_block_from_each_prompt_finds_where_it_departed(
    groups: str, expected: list[int]
) -> None:
    """Its requests end in a reminder that is shorter than a block. So some of its prompts look as
    if it had only altered the answer."""
    engine = engine_of(groups)
    history, hits = prompt(200), []
    for number in range(8):
        tokens = [*history, *prompt(8, seed=50 + number)]
        engine.run_turn(f"a{number}", tokens, program="p", max_tokens=20)
        hits.append(sum(engine.cached[f"a{number}"]))
        history += [*engine.outputs[f"a{number}"], *prompt(30, seed=70 + number)]
        others_take_the_pool(engine, seed=90 + 10 * number)
    assert hits[3:] == expected  # first it has to be known
    assert answers_as_without_a_tier(engine)


@MODES
@KINDS
def test_what_a_long_answer_passes_is_not_taken_while_it_runs(
    async_scheduling: bool, groups: str
) -> None:
    engine = engine_of(groups, async_scheduling=async_scheduling, extra_config={"ttl_s": 60})
    engine.add("a", 500, max_tokens=300, program="p")
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) > 190)
    for i in range(3):  # a pool's worth of others, within one block of the answer
        engine.add(f"x{i}", 800, max_tokens=1, seed=70 + i, program=f"x{i}", final=True)
    engine.run_until_idle()
    others_take_the_pool(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (whole(engine, 800), 0)
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize("scheduler_cls", [None, Scheduler], ids=["ours", "vllms"])
def test_a_hit_is_what_all_groups_have(scheduler_cls: Any) -> None:
    """vLLM 0.26 takes the longest of any group where there is a connector."""
    engine = Engine(
        70,
        groups="state",
        extra_config={"policy": "stock"},
        max_num_batched_tokens=1024,
        scheduler_cls=scheduler_cls,
    )
    engine.add("a", 170, max_tokens=2)
    engine.run_until_idle()
    full, state, _ = (each.kv_cache_group_id for each in managers(engine))
    hashes = engine.requests["a"].block_hashes
    [block] = engine.pool.get_cached_block(hashes[4], [full])
    engine.pool.evict_blocks({block.block_id})  # and the state behind it is still there
    assert engine.pool.get_cached_block(hashes[9], [state])
    engine.add("b", engine.next_prompt("a", 20), max_tokens=2)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    assert answers_as_without_a_tier(engine)


def test_one_state_per_group_is_pinned() -> None:
    engine = engine_of("state")
    engine.run_turn("a", 500, max_tokens=100, program="p")
    assert engine.pinned_blocks() == 599 // 16 + 2


def test_blocks_behind_the_last_state_are_not_pinned() -> None:
    """A turn that was cut short before it left a state at its own end."""
    engine = engine_of("state")
    engine.run_turn("a", 500, max_tokens=100, program="p")
    request = engine.requests["a"]
    kept = engine.side.groups.take_kept([[1], [], []], request)
    states = [each for each, end in zip(kept.blocks, kept.ends, strict=True) if end == 592]
    engine.pool.evict_blocks({states[-1].block_id})
    assert engine.side.groups.take_kept([[1], [], []], request).end < 592


@MODES
def test_nobody_waits_or_is_preempted_for_what_running_turns_spare(async_scheduling: bool) -> None:
    seen = []
    for is_on in (False, True):
        extra = {"policy": "stock"}
        engine = engine_of("state", 70, async_scheduling=async_scheduling, extra_config=extra)
        engine.side.groups.rule.is_on = is_on
        for i in range(12):
            engine.add(f"a{i}", 60 + 17 * i, max_tokens=90, seed=i)
        engine.run_until_idle()
        assert answers_as_without_a_tier(engine)
        seen.append((engine.num_steps, engine.num_preemptions))
    (stock_steps, stock_preemptions), (num_steps, num_preemptions) = seen
    assert num_preemptions <= stock_preemptions
    assert num_steps <= 1.02 * stock_steps
    assert stock_preemptions


def test_a_turn_gives_up_its_state_once_and_keeps_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("state", 80)
    engine.add("a", 320, max_tokens=200, program="p")
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) == 9)
    before = len(tables(engine, "a"))
    rule: Any = engine.side.groups.rule
    assert rule.count_spare() == 2
    assert rule.give_up_spare(engine.scheduler.requests)
    assert not rule.give_up_spare(engine.scheduler.requests)
    assert len(tables(engine, "a")) == before - 2
    engine.steps(2)
    assert len(tables(engine, "a")) == before - 2
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) == 25)
    assert len(tables(engine, "a")) == before + 1
    engine.run_until_idle()
    assert not rule._at
    assert not rule._spare


def test_what_a_turn_spared_that_was_preempted_does_not_count() -> None:
    engine = engine_of("state")
    engine.add("a", 64, max_tokens=100, program="p")
    engine.steps(20)
    rule = engine.side.groups.rule
    assert rule.count_spare() > 0
    request = engine.requests["a"]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, engine.clock())
    assert rule.count_spare() == 0
    engine.run_until_idle()


def test_switched_off_states_leave_a_turn_as_vllm_has_it() -> None:
    seen = []
    for is_on in (True, False):
        engine = engine_of("state")
        engine.connector.side.switch(is_on, engine.clock())
        engine.add("a", 500, max_tokens=100, program="p")
        engine.run_until_idle(until=lambda engine=engine: len(engine.outputs["a"]) == 50)
        states = managers(engine)[1].req_to_blocks["a"]
        seen.append(sum(not block.is_null for block in states))
    assert seen == [2, 1]


def test_a_state_of_this_very_step_is_waited_for_and_no_pin_tried() -> None:
    engine = engine_of("state")
    engine.run_turn("p", 300, program="p")
    tried: list[str] = []
    make_room = engine.connector.make_room

    def spy(request: Any, *args: Any) -> Any:
        tried.append(request.request_id)
        return make_room(request, *args)

    engine.connector.make_room = spy
    tokens = prompt(200, seed=5)
    engine.add("a", tokens + prompt(40, seed=6), program="a")
    engine.run_until_idle(until=lambda: "a" in engine.finish_reasons)
    tokens = prompt(400, seed=8)
    for name in "bc":
        engine.add(name, tokens + prompt(40, seed=9), program=name)
    engine.run_until_idle()
    assert not tried
    assert engine.num_pins() == 4
    assert answers_as_without_a_tier(engine)


def drafting(monkeypatch: pytest.MonkeyPatch, groups: Any, flagged: int, **kwargs: Any) -> Any:
    """An engine whose lookups drop a block of the group `flagged`, as for drafts."""
    drafts_read(monkeypatch, flagged)
    engine = engine_of(groups, **kwargs)
    assert managers(engine)[flagged].use_eagle
    return engine


MIXED = (KvGroup(0, 32), KvGroup(1, 8, WINDOW, 64))
FLAGGED = [("state", 0), ("hybrid", 0), ("hybrid", 1), (MIXED, 0), (MIXED, 1)]


@pytest.mark.parametrize(("groups", "flagged"), FLAGGED)
@MODES
def test_what_is_kept_with_drafts_is_hit(
    monkeypatch: pytest.MonkeyPatch, groups: Any, flagged: int, async_scheduling: bool
) -> None:
    """Others' connectors store and never serve here: without the block that is dropped the next
    lookup drops one more, where no state or window is."""
    engine = drafting(monkeypatch, groups, flagged, async_scheduling=async_scheduling)
    play_under_pressure(engine, 100, engine.side.groups.num_proof_tokens)
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize(("groups", "flagged"), FLAGGED)
def test_turns_of_less_than_a_block_leave_nothing_that_drafts_read_unfilled(
    monkeypatch: pytest.MonkeyPatch, groups: Any, flagged: int
) -> None:
    engine = drafting(monkeypatch, groups, flagged)
    for n in (1, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40):
        tokens = prompt(n, seed=n)
        engine.run_turn(f"a{n}", tokens, max_tokens=1, program="a")  # its last token has no KV
        engine.run_turn(f"b{n}", engine.next_prompt(f"a{n}", 45), max_tokens=2, program="b")
        engine.run_turn(f"c{n}", engine.next_prompt(f"b{n}", 30), max_tokens=2, program="c")
    assert answers_as_without_a_tier(engine)


def test_a_program_is_known_to_keep_what_it_hits_and_not_the_block_that_proves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for groups in ("state", "full"):
        engine = drafting(monkeypatch, groups, 0)
        engine.run_turn("a", 500, max_tokens=100, program="p")
        engine.run_turn("b", engine.next_prompt("a", 20), max_tokens=1, program="p")
        [hit, _] = engine.cached["b"]
        engine = drafting(monkeypatch, groups, 0)
        engine.run_turn("a", 500, max_tokens=100, program="p")
        [program] = engine.side.programs._programs.values()
        assert program.kept.num_tokens == hit == 576


SHAPES = {
    "state": (KvGroup(0, 16), KvGroup(1, 16, STATE), KvGroup(2, 16, STATE)),
    "window": (KvGroup(0, 16), KvGroup(1, 16, WINDOW, 40), KvGroup(2, 16, WINDOW, 64)),
    "sizes": (KvGroup(0, 32), KvGroup(1, 8, WINDOW, 20)),
    "all": (KvGroup(0, 16, FULL), KvGroup(1, 16, STATE), KvGroup(2, 16, WINDOW, 64)),
}


@given(
    st.sampled_from(sorted(SHAPES)),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 90), st.integers(1, 60)),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(1, 10_000), max_size=6),
)
@settings(max_examples=40)
def test_pinned_is_exactly_what_the_next_turn_hits(
    shape: str, is_async: bool, turns: list[tuple[int, int, int]], evicted: list[int]
) -> None:
    engine = engine_of(SHAPES[shape], async_scheduling=is_async)
    tokens: list[int] = []
    for number, (more, answer, _) in enumerate(turns):
        tokens += prompt(more, seed=number)
        engine.run_turn(f"a{number}", tokens, max_tokens=answer, program="p")
        tokens = engine.next_prompt(f"a{number}", 0)
        cached = [block.block_id for block in engine.pool.blocks if block.block_hash]
        engine.pool.evict_blocks({cached[i % len(cached)] for i in evicted if cached})
    engine.run_turn("again", [*tokens, 7], max_tokens=1, program="p")
    held = set(engine.foreign_refs())
    end = max((pin.blocks.end for pin in engine.side.pins), default=0)
    others_take_the_pool(engine)
    engine.add("b", [*tokens, 7, *prompt(turns[-1][2], 50)], max_tokens=5, program="p")
    engine.run_until_idle(until=lambda: "b" in engine.admissions)
    assert held <= tables(engine, "b"), "pinned, and not hit"
    engine.run_until_idle()
    assert engine.cached["b"] == (end, 0)
    assert answers_as_without_a_tier(engine)
