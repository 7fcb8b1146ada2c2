"""config.json -> the KV cache that vLLM will make of it."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.tools.checks.model import aside
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.shape import (
    FULL,
    MLA,
    SLIDING,
    STATE,
    Layer,
    ShapeError,
    count_kinds,
    read_shape,
)

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MLA_KEYS = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DEEPSEEK = {**LLAMA_8B, **MLA_KEYS, "num_hidden_layers": 61}
INDEX = {"index_topk": 2048, "index_head_dim": 128}


def kinds(config: dict[str, Any], **flags: Any) -> list[tuple[Layer, int]]:
    return count_kinds(read_shape(config, **flags))


def test_a_llama_of_8b_takes_128_kib_per_token() -> None:
    shape = read_shape(LLAMA_8B)
    assert shape.context_bytes(1) == 128 * 1024
    assert shape.context_bytes(104_000) == 104_000 * 128 * 1024
    assert kinds(LLAMA_8B) == [(Layer(FULL), 32)]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "config", "num_bytes"),
    [
        ("auto", "fp8", {}, 64),
        ("auto", "fp8_e4m3", {}, 64),
        ("float32", "auto", {}, 256),
        ("auto", "auto", {"torch_dtype": "float32"}, 128),  # vLLM serves float32 as bfloat16
        ("auto", "auto", {"torch_dtype": None}, 128),
        ("auto", "auto", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 64),
        ("auto", "bfloat16", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 128),
    ],
)
def test_bytes_by_type(dtype: str, kv_cache_dtype: str, config: Any, num_bytes: int) -> None:
    shape = read_shape({**LLAMA_8B, **config}, dtype, kv_cache_dtype)
    assert shape.context_bytes(1) == num_bytes * 1024


def test_heads_that_ranks_share_are_kept_once_and_others_by_each() -> None:
    shape = read_shape(LLAMA_8B)
    assert shape.context_bytes(1, 8) == shape.context_bytes(1)
    assert shape.context_bytes(1, 16) == 2 * shape.context_bytes(1)
    mla = read_shape(DEEPSEEK)
    assert mla.context_bytes(1) == 61 * (512 + 64) * 2
    assert mla.context_bytes(1, 8) == 8 * mla.context_bytes(1)


def test_an_index_lies_beside_the_latent_of_each_layer() -> None:
    shape = read_shape({**DEEPSEEK, **INDEX})
    assert shape.context_bytes(1) == 61 * ((512 + 64) * 2 + 128 + 4)
    assert shape.context_bytes(1, 8) == 8 * shape.context_bytes(1)
    with pytest.raises(ShapeError, match="FP8 takes beside an index"):
        read_shape({**DEEPSEEK, **INDEX}, kv_cache_dtype="fp8")
    with pytest.raises(ShapeError, match="not every layer keeps an index"):
        read_shape({**DEEPSEEK, **INDEX, "index_topk_freq": 4})


@pytest.mark.parametrize(
    ("flag", "quantised", "dtype", "value_bytes"),
    [
        ("auto", {"kv_cache_scheme": {"num_bits": 8}}, "fp8", 1),
        ("auto", {"kv_cache_scheme": {"num_bits": 4}}, "nvfp4", 0),
        ("auto", {"kv_cache_quant_algo": "FP8"}, "fp8_e4m3", 1),
        ("auto", {"kv_cache_quant_algo": "NVFP4"}, "nvfp4", 0),
        ("auto", {"kv_cache_quant_algo": None}, "auto", 2),
        ("bfloat16", {"kv_cache_quant_algo": "NVFP4"}, "bfloat16", 2),
        ("fp8_per_token_head", {}, "fp8_per_token_head", 0),
    ],
)
def test_what_the_type_of_the_cache_comes_to(
    flag: str, quantised: dict[str, Any], dtype: str, value_bytes: int
) -> None:
    shape = read_shape({**LLAMA_8B, "quantization_config": quantised}, kv_cache_dtype=flag)
    assert (shape.kv_cache_dtype, shape.value_bytes) == (dtype, value_bytes)


def test_a_window_keeps_no_more_than_its_tokens() -> None:
    shape = read_shape({**LLAMA_8B, "sliding_window": 1000, "sliding_window_pattern": 4})
    per_layer = 4096
    assert shape.context_bytes(500) == 32 * 500 * per_layer
    assert shape.context_bytes(10_000) == (8 * 10_000 + 24 * 1000) * per_layer


WINDOW = {**LLAMA_8B, "sliding_window": 1024}


@pytest.mark.parametrize(
    ("config", "num_full"),
    [
        (WINDOW, 0),
        ({**WINDOW, "model_type": "gpt_oss"}, 16),
        ({**WINDOW, "model_type": "gemma3_text"}, 5),
        ({**WINDOW, "sliding_window_pattern": "LLLG"}, 8),
        ({**WINDOW, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]}, 1),
        ({**WINDOW, "use_sliding_window": True, "max_window_layers": 28}, 28),
        ({**WINDOW, "use_sliding_window": False}, 32),
        ({**LLAMA_8B, "sliding_window": None}, 32),
        ({"architectures": ["X"], "text_config": WINDOW}, 0),
    ],
)
def test_which_layers_have_the_window(config: dict[str, Any], num_full: int) -> None:
    found = dict(kinds(config))
    assert found.get(Layer(FULL), 0) == num_full
    assert found.get(Layer(SLIDING, 1024), 0) == 32 - num_full


def test_without_the_hybrid_manager_windows_beside_full_layers_become_full() -> None:
    mixed = {**WINDOW, "sliding_window_pattern": 4}
    assert kinds(mixed, hybrid_manager=False) == [(Layer(FULL), 32)]
    assert kinds(WINDOW, hybrid_manager=False) == [(Layer(SLIDING, 1024), 32)]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA_8B, ""),
        (WINDOW, ""),
        (DEEPSEEK, ""),
        ({**LLAMA_8B, "attention_chunk_size": 8192}, ""),  # vLLM makes these full
        ({**LLAMA_8B, "layer_types": ["chunked_attention", "full_attention"] * 16}, ""),
        ({**DEEPSEEK, **INDEX}, ""),
        ({**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"] * 16}, ""),
        ({**LLAMA_8B, "mamba_d_state": 16}, ""),
        ({**LLAMA_8B, "attn_type_list": [0, 1]}, ""),
        ({**LLAMA_8B, "attn_type_list": [1, 1]}, ""),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "CrossAttentionSpec"),
        # Granite 4's small models have the keys and none of the layers.
        ({**LLAMA_8B, "mamba_d_state": 16, "layer_types": ["attention"] * 32}, ""),
    ],
)
def test_which_models_are_left_to_vllm(config: dict[str, Any], named: str) -> None:
    assert named in aside(Plan(), read_shape(config))
    assert bool(aside(Plan(), read_shape(config))) is bool(named)


def test_mla_layers_beside_layers_of_state() -> None:
    config = {**DEEPSEEK, "layer_types": ["linear_attention"] * 45 + ["full_attention"] * 16}
    assert kinds(config) == [(Layer(STATE), 45), (Layer(MLA), 16)]


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_config_without_what_is_needed(key: str) -> None:
    config = {name: value for name, value in LLAMA_8B.items() if name != key}
    config.pop("num_key_value_heads")
    with pytest.raises(ShapeError, match="is missing"):
        read_shape(config)
