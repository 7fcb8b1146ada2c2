"""The lab's block hashes are those of vLLM's own hasher around the lab's hash function."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from bench.sim.engine import chain_hasher, hash_block

BLOCK = 16


def request(hasher: Any, tokens: list[int], salt: str | None) -> Request:
    params = SamplingParams(max_tokens=99)
    return Request("r", tokens, params, None, block_hasher=hasher, cache_salt=salt)


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 160, 1000])
def test_hashes_of_a_prompt_and_of_its_growing_answer(length: int, salt: str | None) -> None:
    init_none_hash(hash_block)
    tokens = [(7919 * i) % (1 << 30) for i in range(length)]
    ours = request(chain_hasher(BLOCK), tokens, salt)
    theirs = request(get_request_block_hasher(BLOCK, hash_block), tokens, salt)
    for token in range(2 * BLOCK + 1):
        assert ours.block_hashes == theirs.block_hashes
        ours.append_output_token_ids(token)
        theirs.append_output_token_ids(token)
    assert len(ours.block_hashes) == (length + 2 * BLOCK + 1) // BLOCK
