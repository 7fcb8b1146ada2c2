"""Draft tokens: of what the model did not say nothing is pinned, stored or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.vllm import compat
from tests.vllm.agents import AgentEngine, others_take_the_pool, play_under_pressure, whole
from tests.vllm.drafts import HAS_FLAGS
from tests.vllm.harness import Engine, OracleError, prompt
from tests.vllm.tiering import SLOT_BYTES, answers_as_without_a_tier, park, skip_without_tier

NUM_DRAFTS = 3
pytestmark = pytest.mark.skipif(
    not HAS_FLAGS, reason="this vLLM does not say whose groups drafts read"
)


@pytest.fixture(autouse=True)
def a_tier_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is off because of vLLM's worker, which is a fake here."""
    monkeypatch.setattr(compat, "leaves_right_states", lambda _config: True)


def drafted(
    groups: str, extra: Mapping[str, Any], num_blocks: int = 300, **kwargs: Any
) -> AgentEngine:
    config = {"ttl_s": 60, **extra}
    return AgentEngine(
        num_blocks,
        groups=groups,
        num_drafts=NUM_DRAFTS,
        max_num_batched_tokens=1024,
        extra_config=config,
        **kwargs,
    )


GROUPS = pytest.mark.parametrize("groups", ["full", "state", "hybrid", "mixed"])
MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
ANSWER = 100


def managers(engine: Engine) -> Any:
    return engine.scheduler.kv_cache_manager.coordinator.single_type_managers


def num_dropped(engine: AgentEngine) -> int:
    """How many tokens before its end the next turn finds of the last one: what a lookup drops for
    drafts, and, where states are left amid them, the answer."""
    groups = engine.side.groups
    return int(groups.num_proof_tokens + (ANSWER if groups.num_states else 0))


@pytest.fixture
def with_states(groups: str) -> None:
    if groups == "state" and not versions.CAN_FAIL_REQUESTS:
        pytest.skip("before vLLM 0.30 no state is left where such a lookup ends")


@MODES
@GROUPS
@pytest.mark.usefixtures("with_states")
def test_the_next_turn_hits_what_was_accepted_and_nothing_else(
    groups: str, async_scheduling: bool
) -> None:
    engine = drafted(groups, {}, async_scheduling=async_scheduling)
    play_under_pressure(engine, ANSWER, num_dropped(engine))
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.worker.num_accepted < engine.worker.num_drafted


@MODES
@GROUPS
def test_what_is_stored_is_what_was_accepted(groups: str, async_scheduling: bool) -> None:
    skip_without_tier(groups)
    extra = {"dram_bytes": 400 * SLOT_BYTES}
    engine = drafted(groups, extra, async_scheduling=async_scheduling)
    engine.run_turn("a", 500, max_tokens=ANSWER, program="p")
    park(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), max_tokens=50, program="p")
    assert engine.cached["b"] == (0, whole(engine, 500 + ANSWER - num_dropped(engine)))
    assert answers_as_without_a_tier(engine)


@MODES
@pytest.mark.parametrize("dram", [0, 400 * SLOT_BYTES], ids=["pins", "DRAM"])
@pytest.mark.parametrize(
    ("groups", "read"), [("full", 0), ("hybrid", 0), ("hybrid", 1), ("state", 0), ("mixed", 0)]
)
@pytest.mark.usefixtures("with_states")
def test_short_turns_and_long_ones_with_drafts_under_way(
    groups: str, read: int, dram: int, async_scheduling: bool
) -> None:
    if dram:
        skip_without_tier(groups)
    extra = {"dram_bytes": dram}
    engine = drafted(groups, extra, draft_group=read, async_scheduling=async_scheduling)
    play_under_pressure(engine, ANSWER, num_dropped(engine))
    for n in (1, 15, 16, 17, 33):
        engine.run_turn(f"s{n}", prompt(n, seed=n), max_tokens=4, program="s")
        engine.run_turn(f"t{n}", engine.next_prompt(f"s{n}", 45), max_tokens=4, program="s")
    park(engine)
    engine.run_turn("last", engine.next_prompt("a2", 20), max_tokens=50, program="p")
    assert bool(engine.cached["last"][1]) is bool(dram)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.worker.num_accepted < engine.worker.num_drafted


# --- states that were left amid drafts ----------------------------------------------------------
@MODES
@pytest.mark.parametrize("dram", [0, 400 * SLOT_BYTES], ids=["pins", "DRAM"])
def test_a_state_that_drafts_spoilt_is_never_found(dram: int, async_scheduling: bool) -> None:
    """The worker miscounts accepted drafts, as vLLM's did: every state of an answer is wrong."""
    skip_without_tier("state")
    extra = {"dram_bytes": dram}
    engine = drafted("state", extra, async_scheduling=async_scheduling)
    engine.worker.spoils_drafted_states = True
    play_under_pressure(engine, ANSWER, num_dropped(engine))
    for n in range(90, 98):
        engine.run_turn(f"s{n}", prompt(n, seed=n), max_tokens=40, program="s")
        engine.run_turn(f"t{n}", engine.next_prompt(f"s{n}", 5), max_tokens=4, program="s")
        assert 0 < sum(engine.cached[f"t{n}"]) < n
    park(engine)
    engine.run_turn("last", engine.next_prompt("a2", 20), max_tokens=50, program="p")
    assert bool(engine.cached["last"][1]) is bool(dram)
    assert answers_as_without_a_tier(engine)


def test_where_vllm_itself_finds_what_drafts_spoilt_it_is_wrong_and_not_stored() -> None:
    """The negative control, and why there is no tier with such a --prefix-cache-retention-interval:
    every block is hashed."""
    skip_without_tier("state")
    extra = {"dram_bytes": 400 * SLOT_BYTES}
    cache = {"prefix_cache_retention_interval": None}
    engine = drafted("state", extra, cache=cache)
    assert not engine.side.tier.is_up
    engine.worker.spoils_drafted_states = True
    engine.run_turn("a", 495, max_tokens=ANSWER, program="p")  # drafts begin at a block's end
    with pytest.raises(OracleError, match="b reads wrong KV"):
        engine.run_turn("b", engine.next_prompt("a", 20), program="p")


@MODES
def test_the_state_at_a_prompts_end_stays_while_a_long_answer_runs(async_scheduling: bool) -> None:
    skip_without_tier("state")
    engine = drafted("state", {}, async_scheduling=async_scheduling)
    engine.add("a", 500, max_tokens=300, program="p")
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) > 50)
    rule: Any = engine.side.groups.rule
    assert rule.count_spare() == 2
    table = managers(engine)[1].req_to_blocks["a"]
    assert sum(not block.is_null for block in table) <= 3 + NUM_DRAFTS
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) > 190)
    assert sum(not block.is_null for block in table) <= 3 + NUM_DRAFTS
    for i in range(3):
        engine.add(f"x{i}", 800, max_tokens=1, seed=70 + i, program=f"x{i}", final=True)
    engine.run_until_idle()
    others_take_the_pool(engine)
    assert not rule._at
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"] == (whole(engine, 500 - rule.num_proof_tokens), 0)
    assert answers_as_without_a_tier(engine)


def test_a_turn_gives_up_the_states_of_its_prompts_end_once() -> None:
    skip_without_tier("state")
    engine = drafted("state", {})
    engine.add("a", 500, max_tokens=200, program="p")
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) > 20)
    rule: Any = engine.side.groups.rule
    num_free = engine.free_blocks()
    assert rule.give_up_spare(engine.scheduler.requests)
    assert engine.free_blocks() == num_free + 2
    assert not rule.give_up_spare(engine.scheduler.requests)
    engine.steps(2)
    assert rule.count_spare() == 0
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)


@MODES
@pytest.mark.parametrize("num_tokens", [500, 512, 513])
def test_a_state_that_the_next_chunk_reads_is_not_given_up(
    num_tokens: int, async_scheduling: bool
) -> None:
    """Whoever comes in the very step of that chunk takes all the room that there is."""
    skip_without_tier("state")
    for num_blocks in range(50, 66):
        engine = drafted("state", {}, num_blocks, async_scheduling=async_scheduling)
        rule: Any = engine.side.groups.rule
        manager = engine.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def eager(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = allocate(request, *args, **kwargs)  # noqa: B023
            while rule.give_up_spare(engine.scheduler.requests):  # noqa: B023
                pass
            return found

        manager.allocate_slots = eager
        engine.add("a", num_tokens, max_tokens=2, program="p")
        engine.step()
        for i in range(6):
            engine.add(f"x{i}", 60 + i, max_tokens=2, seed=i, program=f"x{i}", final=True)
        engine.run_until_idle()
        assert answers_as_without_a_tier(engine)
