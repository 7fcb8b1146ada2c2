"""LoRA adapters on a real server: same tokens, same program, never the same KV in either tier."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA
from tests.server.conftest import DRAM_BYTES
from tests.server.helpers import dram_hits, eventually, in_flight, reset, tokens_of, told

RANK = 8
MAX_TOKENS = 12
NUM_BLOCKS = 64
MODELS = (SERVED_NAME, "one", "other")


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of every layer's queries and values, strong enough to change what is said."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    sizes = {"q_proj": LLAMA.heads * LLAMA.head_dim, "v_proj": LLAMA.kv_heads * LLAMA.head_dim}
    tensors = {}
    for layer in range(LLAMA.layers):
        for name, size in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, LLAMA.hidden)), ("B", (size, RANK))):
                weights = random.normal(0, 0.3, shape).astype(np.float32)
                tensors[f"{key}.lora_{part}.weight"] = weights
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": list(sizes), "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(MODELS[1:])}


@pytest.fixture(scope="module")
def server(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[VllmServer]:
    """Turns leave for DRAM at once."""
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with VllmServer(
        tiny_model,
        "test-lora",
        num_blocks=NUM_BLOCKS,
        connector={"policy": "fixed_ttl", "ttl_s": 0, "dram_bytes": DRAM_BYTES},
        args=(
            "--enable-lora",
            "--max-lora-rank",
            str(RANK),
            "--max-loras",
            "2",
            "--lora-modules",
            *modules,
        ),
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ) as server:
        yield server


def complete(server: VllmServer, model: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True, **fields})
    assert isinstance(answer, dict)
    return answer


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def turn(server: VllmServer, model: str, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    answer = complete(server, model, prompt, vllm_xargs={"job_id": "same"})
    return ids(answer), told(answer)["cached_tokens"]


def cold(server: VllmServer, model: str, prompt: list[int]) -> list[int]:
    """The answer with nothing cached."""
    return ids(complete(server, model, prompt, cache_salt=f"cold {model} {len(prompt)}"))


def press(server: VllmServer, seed: str) -> None:
    """Fill VRAM with something else, so that only DRAM has what was there."""
    eventually(lambda: in_flight(server) == 0)
    complete(server, SERVED_NAME, tokens_of(1900, seed), cache_salt=seed)


def test_adapters_and_the_base_model_share_no_block(server: VllmServer) -> None:
    reset(server)
    prompt = tokens_of(500, "shared")
    first, _ = turn(server, "one", prompt)
    further = prompt + first + tokens_of(40, "tool")
    expected = {model: cold(server, model, further) for model in MODELS}
    assert len({tuple(answer) for answer in expected.values()}) == len(MODELS)
    press(server, "press 1")
    for model in ("other", SERVED_NAME):
        assert turn(server, model, further) == (expected[model], {"vram": 0, "dram": 0})
    press(server, "press 2")
    known = dram_hits(server)
    answer, cached = turn(server, "one", further)
    assert answer == expected["one"]
    assert cached["dram"] >= 480 - cached["vram"]
    assert eventually(lambda: dram_hits(server) - known)


def test_an_adapter_of_other_weights_in_the_same_place_needs_a_reset(
    server: VllmServer, adapters: dict[str, Path]
) -> None:
    """vLLM hashes an adapter's name and path; docs/switch-off.md says what to do."""
    reset(server)
    prompt = tokens_of(500, "in place")
    first, _ = turn(server, "one", prompt)
    further = prompt + first + tokens_of(40, "tool")
    old = cold(server, "one", further)
    write_adapter(adapters["one"], seed=99)
    body = {"lora_name": "one", "lora_path": str(adapters["one"]), "load_inplace": True}
    server.post("/v1/load_lora_adapter", body)
    reset(server)
    assert turn(server, "one", further)[1] == {"vram": 0, "dram": 0}
    new = cold(server, "one", [*further, 1])
    assert turn(server, "one", [*further, 1])[0] == new
    assert ids(complete(server, "one", further, cache_salt="new")) != old
