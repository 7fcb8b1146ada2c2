"""A model with attention windows on a real server with vLLM's defaults: what its next turn hits."""

from __future__ import annotations

from typing import Any

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.conftest import ServerFactory
from tests.server.helpers import BLOCK, tokens_of

ANSWER = 200  # more than the window of 128: the prompt's own window has left the turn by then


def ask_tokens(server: VllmServer, prompt: list[int], num: int, **fields: Any) -> dict[str, Any]:
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": num, "temperature": 0}
    answer: dict[str, Any] = server.post(
        "/v1/completions", body | {"return_token_ids": True, "ignore_eos": True} | fields
    )
    return answer


def ids_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def others_take_vram(server: VllmServer) -> None:
    for i in range(4):
        xargs = {"job_id": f"other {i}", "is_last_step": 1}
        ask_tokens(server, tokens_of(1500, f"other {i}"), 2, vllm_xargs=xargs)


@pytest.mark.parametrize("family", ["hybrid", "gpt_oss"])
def test_the_next_turn_hits_prompt_and_answer_after_others_took_vram(
    server_factory: ServerFactory, family: str, request: pytest.FixtureRequest
) -> None:
    server = server_factory(
        "windows",
        model=request.getfixturevalue(f"{family}_model"),
        num_blocks=221,
        connector={"policy": "fixed_ttl", "ttl_s": 3600, "max_ttl_s": 3600},
        max_model_len=2048,
        max_num_batched_tokens=256,
    )
    try:
        tokens = tokens_of(600, "prompt")
        first = ask_tokens(server, tokens, ANSWER, vllm_xargs={"job_id": "windows"})
        tokens = tokens + ids_of(first)
        hit = (len(tokens) - 1) // BLOCK * BLOCK
        others_take_vram(server)
        tokens = tokens + tokens_of(50, "tool")
        second = ask_tokens(server, tokens, 40, vllm_xargs={"job_id": "windows"})
        cached = second["kv_transfer_params"]["continuum"]["cached_tokens"]
        assert cached == {"vram": hit, "dram": 0}
        assert ids_of(second) == ids_of(ask_tokens(server, tokens, 40, cache_salt="cold"))
    finally:
        server_factory.stop("windows")
