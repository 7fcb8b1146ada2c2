"""The tiny model behind a stock server: the ground that every other server test stands on."""

from __future__ import annotations

import random
from typing import Any

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA
from bench.serve.tokenizer import words
from tests.server.conftest import ServerFactory

BLOCK = 32


def stock(server_factory: ServerFactory) -> VllmServer:
    return server_factory("stock", num_blocks=200)


def complete(server: VllmServer, prompt: str, max_tokens: int = 16) -> tuple[str, dict[str, Any]]:
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = server.post("/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]


def prompt_of(num_words: int, seed: int) -> str:
    vocabulary = words(LLAMA.vocab)
    return "".join(" " + w for w in random.Random(seed).choices(vocabulary, k=num_words))


def test_an_answer_sent_again_as_history_hits_the_prefix_cache(
    server_factory: ServerFactory,
) -> None:
    server = stock(server_factory)
    prompt = prompt_of(300, seed=1)
    text, usage = complete(server, prompt, max_tokens=40)
    assert usage["prompt_tokens"] == 300  # one made-up word is one token
    _, again = complete(server, prompt + text + prompt_of(20, seed=2))
    assert again["prompt_tokens"] == 300 + 40 + 20
    # KV exists for all but the last answered token, and is cached in whole blocks.
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == (300 + 40 - 1) // BLOCK * BLOCK


def test_answers_depend_on_the_prompt_and_not_on_the_cache(server_factory: ServerFactory) -> None:
    server = stock(server_factory)
    first, second = prompt_of(400, seed=3), prompt_of(400, seed=4)
    cold = [complete(server, p)[0] for p in (first, second)]
    warm = [complete(server, p)[0] for p in (first, second)]
    assert cold[0] != cold[1]
    assert cold == warm
    assert server.post("/reset_prefix_cache")
    assert [complete(server, p)[0] for p in (first, second)] == cold


def test_metrics_count_tokens_and_prefix_hits(server_factory: ServerFactory) -> None:
    server = stock(server_factory)
    before = server.metrics()
    prompt = prompt_of(256, seed=5)
    complete(server, prompt)
    complete(server, prompt)
    after = server.metrics()

    def added(name: str) -> float:
        return sum(after[k] - before.get(k, 0.0) for k in after if k[0] == name)

    assert added("vllm:prompt_tokens_total") == 512
    assert added("vllm:prefix_cache_hits_total") == 256 - BLOCK  # the last block is recomputed
    assert server.metric("vllm:kv_cache_usage_perc") == 0.0
