"""Turns of the models that agents run, on the KV groups that vLLM makes of their real layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

from bench.sim import versions
from continuum_connector.vllm import served
from tests.vllm import kv_caches
from tests.vllm.drafts import HAS_FLAGS
from tests.vllm.families import FAMILIES, V4, Family
from tests.vllm.harness import Engine
from tests.vllm.tiering import NO_HYBRID_TIER, answers_as_without_a_tier, park

ALL = pytest.mark.parametrize("family", [*FAMILIES, V4], ids=lambda family: family.name)


def row(family: Family) -> str:
    """What docs/models.md says of it."""
    layers = ", ".join(map(str, family.groups))
    hybrid, states = len(family.groups) > 1, "MambaSpec" in str(family.layers())
    tier = "0.30" if hybrid else "0.26"
    cells = [
        family.name,
        f"{len(family.groups)}: {layers}",
        f"{family.block_size:,}",
        f"{family.block_bytes / 1e6:.2f} MB",
        "0.26, named; 0.29" if states else "0.26",
        tier,
        "-" if family.name == "Llama 4" else "pins, DRAM from 0.32" if states else "pins, DRAM",
        f"{family.block_size // 2:,}",
    ]
    return f"| {' | '.join(cells)} |"


@ALL
def test_the_document_of_models_has_this_row(family: Family) -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert row(family) in text.splitlines()


def cache_of(config: Any, family: Family, num_blocks: int) -> Any:
    """What the engine hands to the scheduler for this model."""
    if kv_caches.LAYOUTS:
        packs = family.name in ("DeepSeek V4", "Gemma 4")
        config.cache_config.kv_cache_layout = "BLHNC" if packs else "LBNHC"
    with set_current_vllm_config(config):
        at_worker = kv_caches.describe(config, family.layers(), num_blocks)
    config.cache_config.num_gpu_blocks_override = None
    return generate_scheduler_kv_cache_config([at_worker])


class FamilyEngine(Engine):
    """The harness with a real model's groups; the model itself is fake, as ever."""

    def __init__(self, family: Family, num_blocks: int, **kwargs: Any) -> None:
        self.family = family
        config = versions.vllm_config(block_size=family.block_size)
        if "MambaSpec" in str(family.layers()):
            config.cache_config.mamba_cache_mode = "align"
        groups = served.read_groups(config, cache_of(config, family, num_blocks))
        batch = {"max_num_batched_tokens": max(512, 2 * family.block_size)}
        super().__init__(num_blocks, groups=list(groups), **batch, **kwargs)

    def _cache(self, num_blocks: int) -> Any:
        built = cache_of(self.vllm_config, self.family, num_blocks)
        if self.num_drafts:
            versions.with_drafts(built, self.draft_group, self.num_drafts)
        return built


NUM_FOREIGN = 20  # blocks of a foreign program


def num_blocks(family: Family) -> int:
    """Room for a turn that is kept and a foreign program, and not for a second one. A window or a
    chunk has as many blocks as full attention, a state a few."""
    if family is V4:  # blocks of 4 tokens: a step takes hundreds
        return 320
    return 40 if family.block_size > 128 else 34 * len(family.groups)


def tokens(family: Family) -> tuple[int, int]:
    """A prompt that ends amid its fourth block, and an answer that ends behind it."""
    return max(4 * family.block_size - 20, 20), 40


def crowd(engine: FamilyEngine) -> None:
    """Programs that, one after the other, want more blocks than there are."""
    for other in "uvwxyz":
        length = min(NUM_FOREIGN * engine.family.block_size, 30_000)
        engine.add(other, length, 1, seed=ord(other))
        engine.run_until_idle()


def goes_on(engine: FamilyEngine, between: Callable[[FamilyEngine], None]) -> int:
    """Two turns of a program, and what happens between them. Returns what the second can hit: what
    it computes again is named in docs/models.md, (P + A - 1) mod block + 1."""
    prompt, answer = tokens(engine.family)
    engine.add("a", prompt, answer, program="p")
    engine.run_until_idle()
    between(engine)
    engine.add("b", engine.next_prompt("a", 20), 1, program="p")
    engine.run_until_idle()
    return (prompt + answer - 1) // engine.family.block_size * engine.family.block_size


@ALL
def test_the_next_turn_hits_up_to_the_last_block_of_the_answer(family: Family) -> None:
    engine = FamilyEngine(family, num_blocks(family))
    hit = goes_on(engine, crowd)
    assert engine.cached["b"] == (hit, 0)
    assert answers_as_without_a_tier(engine)


@ALL
def test_without_pins_nothing_of_it_is_left(family: Family) -> None:
    engine = FamilyEngine(family, num_blocks(family), connector=None)
    goes_on(engine, crowd)
    assert engine.cached["b"] == (0, 0)


@ALL
def test_it_comes_back_from_dram_where_this_vllm_can_recompute_a_failed_load(
    family: Family,
) -> None:
    extra = {"dram_bytes": 400 * family.block_bytes}
    engine = FamilyEngine(family, num_blocks(family), extra_config=extra)
    hit = goes_on(engine, park)
    has_tier = len(family.groups) == 1 or versions.CAN_FAIL_REQUESTS
    assert engine.cached["b"] == (0, hit if has_tier else 0)
    assert answers_as_without_a_tier(engine)


@pytest.mark.skipif(not HAS_FLAGS, reason="this vLLM does not say whose groups drafts read")
@pytest.mark.skipif(not versions.CAN_FAIL_REQUESTS, reason=NO_HYBRID_TIER)
@pytest.mark.parametrize("group", range(5))
def test_deepseek_v4_comes_back_from_dram_with_drafts_that_read_any_of_its_groups(
    group: int,
) -> None:
    extra = {"dram_bytes": 400 * V4.block_bytes}
    engine = FamilyEngine(V4, 1200, extra_config=extra, num_drafts=3, draft_group=group)
    goes_on(engine, park)
    found = sum(tokens(V4)) - 1 - engine.connector.side.groups.num_proof_tokens
    assert engine.cached["b"] == (0, found // 256 * 256)
    assert answers_as_without_a_tier(engine)
    assert 0 < engine.worker.num_accepted < engine.worker.num_drafted
