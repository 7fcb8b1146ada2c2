"""What makes KV differ though the tokens are the same: an adapter, an image, a salt.

vLLM puts each into the hashes of the blocks (v1/core/kv_cache_utils.py,
generate_block_hash_extra_keys), and those are the keys of DRAM too.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    GROUPS,
    park,
    run_turn,
    tiered,
    wind_down,
)

NUM_IMAGE_TOKENS = 32


def adapter(name: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, 1 + ord(name[-1]), f"/adapters/{name}")}


def image(name: str) -> dict[str, Any]:
    """The same placeholder tokens for every image, behind two blocks of text."""
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=32, length=NUM_IMAGE_TOKENS),
    )
    return {"mm_features": [feature]}


def salt(name: str) -> dict[str, Any]:
    return {"cache_salt": name}


def engine_of(groups: str) -> Engine:
    engine = tiered(groups=groups)
    scheduler = engine.scheduler  # as that of a model with images
    scheduler.max_num_encoder_input_tokens = 1024
    scheduler.encoder_cache_manager = EncoderCacheManager(1024)
    return engine


@pytest.mark.parametrize(
    ("of", "num_shared"),
    [(adapter, 0), (image, 32), (salt, 0)],
    ids=["adapters", "images", "salts"],
)
@GROUPS
def test_turns_that_differ_in_no_token_share_no_block_in_dram(
    groups: str, of: Any, num_shared: int
) -> None:
    """`num_shared`: tokens before the difference."""
    engine = engine_of(groups)
    run_turn(engine, "a", 200, program="p", **of("one"))
    park(engine)
    stored = engine.worker.num_blocks_stored
    run_turn(engine, "other", 200, program="q", **of("two"))
    vram, dram = engine.cached["other"]
    assert vram == 0
    assert dram <= num_shared
    if groups == "full":  # of windows the first blocks are not kept
        assert dram == num_shared
    assert engine.worker.num_blocks_stored > stored
    park(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p", **of("one"))
    assert engine.cached["b"] == (0, 208)
    wind_down(engine)


def test_a_turn_without_an_adapter_shares_nothing_with_one_that_has_it() -> None:
    engine = tiered()
    run_turn(engine, "a", 200, program="p")
    park(engine)
    run_turn(engine, "other", 200, program="p", **adapter("one"))
    assert engine.cached["other"] == (0, 0)
