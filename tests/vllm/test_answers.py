"""Clients that send answers back without their thoughts: the next turn hits the last prompt."""

from __future__ import annotations

from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.scheduler.kv_groups import FULL, KvGroups
from tests.vllm.agents import AgentEngine, others_take_the_pool, whole
from tests.vllm.drafts import drafts_read
from tests.vllm.harness import prompt
from tests.vllm.tiering import NO_HYBRID_TIER, SLOT_BYTES, answers_as_without_a_tier

KINDS = pytest.mark.parametrize("groups", ["full", "state", "chunked", "hybrid", "mixed"])
PINS = {"policy": "fixed_ttl", "ttl_s": 60}
DRAM = {"policy": "lru_offload", "dram_bytes": 800 * SLOT_BYTES}
TIERS = pytest.mark.parametrize("keys", [PINS, DRAM], ids=["pins", "dram"])
ANSWER, TOOL = 100, 40


def engine_of(groups: str, keys: dict[str, Any], **kwargs: Any) -> AgentEngine:
    if "dram_bytes" in keys and groups != "full" and not versions.CAN_FAIL_REQUESTS:
        pytest.skip(NO_HYBRID_TIER)
    return AgentEngine(300, groups=groups, extra_config=keys, max_num_batched_tokens=1024, **kwargs)


def play(
    engine: AgentEngine, alters: list[bool], name: str = "p", first: int = 500
) -> list[tuple[int, int]]:
    """A turn more than `alters` says: whether a turn's answer is altered before it is sent back.
    Others take the pool after each. Returns what each later turn hit, and of how many tokens of
    the prompt before it."""
    tokens, num_before, hits = prompt(first, seed=len(name)), 0, []
    for turn, is_altered in enumerate([*alters, False]):
        request_id = f"{name}{turn}"
        engine.run_turn(request_id, tokens, max_tokens=ANSWER, program=name)
        if turn:
            hits.append((sum(engine.cached[request_id]), num_before))
        others_take_the_pool(engine, seed=90 + 10 * turn)
        num_before = len(tokens)
        thoughtless = tokens + prompt(TOOL, seed=turn)
        tokens = thoughtless if is_altered else engine.next_prompt(request_id, TOOL, seed=turn)
    return hits


def prompts_end(engine: AgentEngine, num_tokens: int) -> int:
    groups: KvGroups = engine.connector.side.groups
    return groups.last_end(num_tokens)


@KINDS
@TIERS
def test_a_turn_after_an_altered_answer_hits_the_prompt_before_it(
    groups: str, keys: dict[str, Any]
) -> None:
    engine = engine_of(groups, keys)
    hits = play(engine, [True] * 4)
    # What came of the first turn's answer nobody could know.
    for hit, num_before in hits[groups != "full" :]:
        assert hit == prompts_end(engine, num_before)
    for hit, num_before in play(engine, [True] * 2, name="other"):  # but of a later program's
        assert hit == prompts_end(engine, num_before)
    assert answers_as_without_a_tier(engine)
    engine.clock.advance(100.0)
    engine.run_until_idle()
    assert engine.usage() == engine.num_pins() == 0


@pytest.mark.parametrize(("groups", "flagged"), [("state", 0), ("hybrid", 0), ("hybrid", 1)])
def test_drafts_drop_a_block_of_it(
    monkeypatch: pytest.MonkeyPatch, groups: str, flagged: int
) -> None:
    if groups == "state" and not versions.CAN_FAIL_REQUESTS:
        pytest.skip("before vLLM 0.30 no state is left where such a lookup ends")
    drafts_read(monkeypatch, flagged)
    engine = engine_of(groups, PINS)
    for hit, num_before in play(engine, [True] * 3)[1:]:
        assert hit == prompts_end(engine, num_before - engine.side.groups.num_proof_tokens) > 0
    assert answers_as_without_a_tier(engine)


@KINDS
@TIERS
def test_one_that_was_altered_once_is_hit_whole_again(groups: str, keys: dict[str, Any]) -> None:
    engine = engine_of(groups, keys)
    *_, before, after = play(engine, [True, True, False, False])
    for hit, num_before in (before, after):
        assert hit == whole(engine, num_before + ANSWER)
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize("groups", ["state", "hybrid", "mixed"])
def test_who_goes_on_from_answers_keeps_nothing_for_prompts(groups: str) -> None:
    def pinned(*alters: bool) -> int:
        """Blocks of other groups than those of full attention."""
        engine = engine_of(groups, PINS)
        play(engine, list(alters))
        [pin] = engine.side.pins
        kinds = [group.kind for group in engine.side.groups]
        return sum(kinds[int.from_bytes(key[-4:], "big")] != FULL for key in pin.blocks.keys)

    assert pinned(True) == 2 * pinned(False)
    assert pinned(True, False) == pinned(False)


def test_what_others_took_of_a_prompts_end_is_not_kept_in_part() -> None:
    """A long answer, while which others take all that is free."""
    engine = engine_of("hybrid", PINS)
    play(engine, [True])
    engine.add("a", 600, max_tokens=200, program="p", seed=5)
    engine.run_until_idle(until=lambda: len(engine.outputs["a"]) > 150)
    for name in ("x1", "x2", "x3", "x4"):
        engine.add(name, 900, max_tokens=2, seed=int(name[1:]), program=name, final=True)
        engine.run_until_idle(until=lambda name=name: name in engine.finish_reasons)
    assert "a" not in engine.finish_reasons
    engine.run_until_idle()
    pin = max(engine.side.pins, key=lambda pin: pin.started)  # the other is of what `play` left
    ends = [end for end in pin.blocks.ends if end <= 600]
    assert len(ends) == len(set(ends)), "nothing but full attention before the answer"
    assert answers_as_without_a_tier(engine)
