"""Draft tokens: of what the model did not say nothing is pinned, stored or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.vllm.agents import AgentEngine, model_output, play_under_pressure, whole
from tests.vllm.drafts import drafts_read
from tests.vllm.harness import prompt
from tests.vllm.tiering import SLOT_BYTES, answers_as_without_a_tier, skip_without_tier

NUM_DRAFTS = 3


class DraftEngine(AgentEngine):
    """Each step some drafts follow the last token: the first `n` of three are right, n = 0, 1, 2, 3
    in turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler.num_spec_tokens = NUM_DRAFTS
        self.num_right = self.num_drafted = 0
        self._said: dict[str, list[int]] = {}

    def step(self) -> bool:
        for request in self.scheduler.running:
            request.spec_token_ids = self._drafts(request)
        return super().step()

    def _drafts(self, request: Any) -> list[int]:
        if request.num_computed_tokens < request.num_tokens - 1 or not request.num_output_tokens:
            return []
        if request.request_id not in self._said:
            tokens, number = list(request.prompt_token_ids), request.max_tokens + NUM_DRAFTS
            self._said[request.request_id] = model_output(tokens, number)
        said = self._said[request.request_id][request.num_output_tokens :][:NUM_DRAFTS]
        num_right = self.num_steps % (NUM_DRAFTS + 1)
        self.num_right += num_right
        self.num_drafted += len(said)
        return said[:num_right] + [1] * (NUM_DRAFTS - num_right)


def drafted(groups: str, extra: Mapping[str, Any]) -> DraftEngine:
    config = {"ttl_s": 60, **extra}
    return DraftEngine(300, groups=groups, max_num_batched_tokens=1024, extra_config=config)


@pytest.mark.parametrize("groups", ["full", "state", "hybrid", "chunked", "mixed"])
def test_the_next_turn_hits_what_was_accepted_and_nothing_else(groups: str) -> None:
    engine = drafted(groups, {})
    play_under_pressure(engine, 100)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.num_right < engine.num_drafted


@pytest.mark.parametrize("groups", ["full", "hybrid"])
def test_what_is_stored_is_what_was_accepted(groups: str) -> None:
    skip_without_tier(groups)
    engine = drafted(groups, {"dram_bytes": 400 * SLOT_BYTES})
    engine.run_turn("a", 500, max_tokens=100, program="p")
    engine.clock.advance(100.0)
    engine.run_until_idle()
    assert engine.pool.reset_prefix_cache()
    engine.run_turn("b", engine.next_prompt("a", 20), max_tokens=50, program="p")
    assert engine.cached["b"] == (0, whole(engine, 600))
    assert answers_as_without_a_tier(engine)


@pytest.mark.parametrize("dram", [0, 400 * SLOT_BYTES])
@pytest.mark.parametrize(("groups", "read"), [("full", 0), ("hybrid", 0), ("hybrid", 1)])
def test_what_drafts_read_is_kept_and_stored_with_drafts_under_way(
    monkeypatch: pytest.MonkeyPatch, groups: str, read: int, dram: int
) -> None:
    if dram:
        skip_without_tier(groups)
    drafts_read(monkeypatch, read)
    engine = drafted(groups, {"dram_bytes": dram})
    play_under_pressure(engine, 100, engine.side.groups.num_proof_tokens)
    for n in (1, 15, 16, 17, 33):
        engine.run_turn(f"s{n}", prompt(n, seed=n), max_tokens=4, program="s")
        engine.run_turn(f"t{n}", engine.next_prompt(f"s{n}", 45), max_tokens=4, program="s")
    engine.clock.advance(100.0)
    engine.run_until_idle()
    assert engine.pool.reset_prefix_cache()
    engine.run_turn("last", engine.next_prompt("a2", 20), max_tokens=50, program="p")
    assert bool(engine.cached["last"][1]) is bool(dram)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.num_right < engine.num_drafted
