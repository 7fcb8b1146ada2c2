"""Shape: what config.json alone says about the KV cache, where no vLLM is there to be asked.

Only of models whose layers all keep a key and a value of one size for every token. For all others
ShapeError: no answer is better than a wrong one. A file that fits no model raises BrokenModelError,
because no server starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from continuum_connector.tools.checks.model_file import BrokenModelError
from continuum_connector.vllm.proven import FP8_DTYPES

FULL = "FullAttentionSpec"
BLOCK_SIZE = 16  # tokens
MOST, MOST_LAYERS = 1 << 40, 100_000  # the largest number that we accept; the most layers
# Models whose code does what their config.json says in these keys, and nothing besides.
PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo2")
_OTHER = (  # keys of layers that keep something else, in models of these types, too
    *("layer_types", "kv_lora_rank", "attention_chunk_size", "hybrid_override_pattern"),
    *("text_config", "is_encoder_decoder", "num_kv_shared_layers", "v_head_dim", "index_topk"),
    *("num_attention_heads_per_layer", "block_configs", "per_layer_config"),
)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


class ShapeError(ValueError):
    """This config.json alone does not say what the KV cache will be."""


@dataclass(frozen=True)
class Shape:
    """`token_bytes`: of one layer, over all KV heads."""

    architecture: str
    num_layers: int
    num_heads: int
    token_bytes: int

    def context_bytes(self, num_tokens: int, num_ranks: int = 1) -> int:
        """KV bytes of so many tokens. Where there are more ranks than heads, several keep one."""
        copies = max(1, num_ranks // self.num_heads)
        return num_tokens * self.num_layers * self.token_bytes * copies


def read_shape(
    config: Mapping[str, Any], dtype: str = "auto", kv_cache_dtype: str = "auto"
) -> Shape:
    """Read config.json as vLLM would with these flags. Raises ShapeError."""
    heads, layers = _number(config, "num_attention_heads"), _number(config, "num_hidden_layers")
    kv_heads = _number(config, "num_key_value_heads") or heads
    if layers > MOST_LAYERS:
        raise BrokenModelError(
            f"config.json is broken: {layers} layers are more than any model has"
        )
    model_type = config.get("model_type")
    odd = next((key for key in _OTHER if config.get(key)), "")
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        odd = "sliding_window"
    if model_type not in PLAIN or odd:
        what = f"{odd} is set" if odd else f"its model_type is {str(model_type)[:100]}"
        raise ShapeError(f"{what}, so only vLLM knows what its layers keep, and none is here")
    if not heads or not layers:
        raise ShapeError("num_attention_heads or num_hidden_layers is missing")
    size = _number(config, "head_dim") or _number(config, "hidden_size") // heads
    if not size:
        raise ShapeError("hidden_size is missing")
    architectures = config.get("architectures") or ["?"]
    if not isinstance(architectures, list):
        raise BrokenModelError("config.json is broken: architectures is no list")
    num_bytes = 2 * kv_heads * size * _value_bytes(config, dtype, kv_cache_dtype)
    return Shape(str(architectures[0]), layers, kv_heads, num_bytes)


def _number(config: Mapping[str, Any], name: str) -> int:
    """The number under this key; 0 if there is none."""
    value = config.get(name)
    if value is None:
        return 0
    if isinstance(value, list):
        raise ShapeError(f"{name} differs from layer to layer")
    if not isinstance(value, int) or not 0 <= value < MOST:
        said = repr(value)[:100]
        raise BrokenModelError(f"config.json is broken: {name} is {said}, which counts nothing")
    return value


def _value_bytes(config: Mapping[str, Any], dtype: str, kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache. A checkpoint may ask for a type of its own."""
    if kv_cache_dtype in FP8_DTYPES:
        return 1
    if kv_cache_dtype == "auto":
        if config.get("quantization_config"):
            raise ShapeError("quantization_config may name the type of the KV cache")
        own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = own.removeprefix("torch.") if dtype == "auto" else dtype
        kv_cache_dtype = "bfloat16" if dtype == "float32" else dtype
    if kv_cache_dtype not in _BYTES:
        raise ShapeError(f"how many bytes {kv_cache_dtype} takes is not known without vLLM")
    return _BYTES[kv_cache_dtype]
