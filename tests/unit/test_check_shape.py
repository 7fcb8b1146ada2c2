"""config.json alone -> the KV cache, where no vLLM can be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum_connector.tools.checks import model as models
from continuum_connector.tools.checks.machine import Kv, VllmSeen
from continuum_connector.tools.checks.model import BrokenModelError, ShapeError
from continuum_connector.tools.checks.plan import read_plan
from tests.unit import fake_machine as fake
from tests.vllm.model_configs import LLAMA_8B

KIB = 1024


def read(config: dict[str, Any], *words: str) -> Kv:
    return models.by_config(config, read_plan(words, {}), VllmSeen())


def test_a_llama_of_8b_takes_128_kib_per_token() -> None:
    kv = read(LLAMA_8B)
    assert models.token_bytes(kv) == 128 * KIB
    assert models.context_bytes(kv, 104_000) == 104_000 * 128 * KIB
    wide = read(LLAMA_8B, "-tp", "16")
    assert models.token_bytes(wide) == 256 * KIB, "two ranks keep the same head"


@pytest.mark.parametrize(
    ("kv_cache_dtype", "config", "num_kib"),
    [
        ("fp8", {}, 64),
        ("auto", {"torch_dtype": "float32"}, 128),  # vLLM serves float32 as bfloat16
        ("auto", {"torch_dtype": None}, 128),
        ("bfloat16", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 128),
    ],
)
def test_bytes_by_type(kv_cache_dtype: str, config: Any, num_kib: int) -> None:
    found = read({**LLAMA_8B, **config}, "--kv-cache-dtype", kv_cache_dtype)
    assert models.token_bytes(found) == num_kib * KIB


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon_h1"},
        {"model_type": None},
        {"layer_types": ["full_attention"] * 32},
        {"sliding_window": 4096},
        {"kv_lora_rank": 512},
        {"text_config": {"num_hidden_layers": 2}},
        {"per_layer_config": {"05": {"head_dim": 512}}},
        {"quantization_config": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_what_only_vllm_knows_is_not_guessed(config: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        read({**LLAMA_8B, **config})


def test_a_file_beside_the_config_may_quantise_the_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read(models.read_model_config(str(tmp_path), {}))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {}}')
    with pytest.raises(ShapeError, match="quantization_config may name"):
        read(models.read_model_config(str(tmp_path), {}))


def test_a_window_that_is_not_used_is_none() -> None:
    assert read({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False})


@pytest.mark.parametrize("value", ["four", -1, 1.5, 1 << 41])
def test_a_file_that_fits_no_model_is_broken(value: Any) -> None:
    with pytest.raises(BrokenModelError):
        read({**LLAMA_8B, "num_hidden_layers": value})


# --- what vLLM makes, in bytes ----------------------------------------------------------------
def kv(groups: Any, block_bytes: int) -> Kv:
    return msgspec.convert(fake.KV | {"groups": groups, "block_bytes": block_bytes}, Kv)


def test_a_context_takes_whole_blocks_of_each_group() -> None:
    full = kv([("FullAttentionSpec", 16, None)], 1000)
    assert (models.context_bytes(full, 16), models.context_bytes(full, 17)) == (1000, 2000)
    assert models.token_bytes(full) == 62.5
    assert models.new_bytes(full, 8) == 500


def test_of_windows_and_states_a_context_takes_what_the_next_turn_reads() -> None:
    found = kv(
        [("SlidingWindowSpec", 16, 64), ("FullAttentionSpec", 16, None), ("MambaSpec", 16, None)],
        1000,
    )
    assert models.context_bytes(found, 1600) == (4 + 100 + 1) * 1000
    assert models.state_blocks(found) == [16]
    assert models.new_bytes(found, 16) == 3000, "a window's tokens are stored, too"


def test_the_largest_unit_is_a_power_of_two_that_divides_the_block() -> None:
    assert [models.match_unit(size) for size in (544, 1056, 2096, 4096)] == [32, 32, 16, 64]
