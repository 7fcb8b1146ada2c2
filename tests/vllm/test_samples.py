"""Samples of one prompt in vLLM's own loop: the prompt is stored once, and stays for the last."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.harness import Engine
from tests.vllm.tiering import tiered, total

TOKENS = 400  # of the prompt: 25 blocks, of which the last is computed again
SIZE = 3


def engine_of(num_slots: int = 400, num_blocks: int = 80, **more: Any) -> Engine:
    """One turn at a time, in VRAM for one and a half; to compute is slow, to load is not."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "config": {"policy": "adaptive"}}
    options |= more
    engine = tiered(num_blocks, num_slots, **options)
    costs = {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-6]}
    engine.connector.costs.restore(costs)
    return engine


def sample(engine: Engine, name: str, hints: dict[str, Any] | None = None) -> None:
    """A trajectory of one turn, as a trainer sends it."""
    said = {"program": name, "final": True, **(hints or {})}
    engine.add(name, TOKENS, 4, seed=7, kv_transfer_params={"continuum": said})
    engine.run_until_idle()


def others(engine: Engine, number: int, seed: int = 50) -> None:
    """Programs that go on, whose KV takes all of VRAM and a place in DRAM."""
    for n in range(seed, seed + number):
        engine.add(f"x{n}", 900, 2, seed=n, program=f"x{n}")
        engine.run_until_idle()


def group(size: int = SIZE) -> dict[str, Any]:
    return {"group": "task-1", "group_size": size}


def stored_slots(engine: Engine) -> int:
    return int(engine.connector.side.tier.index.num_ready)


def test_a_prompt_whose_samples_come_one_by_one_is_computed_and_stored_once() -> None:
    engine = engine_of()
    for n in range(SIZE):
        before = stored_slots(engine)
        sample(engine, f"a{n}", group())
        assert stored_slots(engine) - before == (0 if n else 25)
        others(engine, 2, seed=50 + 2 * n)
    assert [engine.cached[f"a{n}"] for n in range(SIZE)] == [(0, 0), (0, 384), (0, 384)]
    assert total(engine, "sample_prompt_tokens") == 2 * TOKENS
    assert total(engine, "sample_hit_tokens") == 2 * 384
    samples = engine.connector.side._samples
    assert samples.resident("group:task-1", 0.0, engine.clock()) is None


def test_a_prompt_stays_in_a_full_dram_until_the_last_sample_is_over() -> None:
    engine = engine_of(num_slots=90)
    sample(engine, "a0", group(size=2))
    others(engine, 5)
    sample(engine, "a1", group(size=2))
    assert engine.cached["a1"] == (0, 384)
    others(engine, 5, seed=70)
    sample(engine, "a2", {"group": "task-2", "group_size": 2})
    assert engine.cached["a2"] == (0, 0), "nobody was left who wanted it"


def test_who_says_nothing_of_a_group_is_of_one_while_another_with_that_prompt_is_there() -> None:
    engine = engine_of()
    for name in ("a0", "a1"):  # neither is over
        engine.add(name, TOKENS, 4, seed=7, program=name)
    engine.run_until_idle()
    samples = engine.connector.side._samples
    assert len(samples) == 1
    assert samples.of("job:a0") is samples.of("job:a1")
    assert samples.of("job:a0").kept == 0


@pytest.mark.parametrize("size", ["many", 0, -1, 2.5, 10**9, True])
def test_a_size_that_is_none_is_refused_and_the_group_stands(size: Any) -> None:
    engine = engine_of()
    sample(engine, "a0", {"group": "task-1", "group_size": size})
    receipts = engine.kv_transfer_params["a0"]["continuum"]["hints"]
    found = {each["hint"]: each["outcome"] for each in receipts}
    assert found == {"final": "accepted", "group": "accepted", "group_size": "refused"}


def test_a_weight_update_forgets_the_prompt() -> None:
    engine = engine_of()
    sample(engine, "a0", group())
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    sample(engine, "a1", group())
    assert engine.cached["a1"] == (0, 0)
    others(engine, 2)
    sample(engine, "a2", group())
    assert engine.cached["a2"] == (0, 384), "what the new weights computed is there"
