"""Shape: what a model's config.json says about its KV cache, as vLLM will lay it out.

vLLM asks the model's layers, which do not exist here. So this reads only what is clear, and raises
ShapeError for the rest: no answer is better than a wrong one. A file that fits no model raises
BrokenModelError, because no server starts with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from continuum_connector.tools.checks import states
from continuum_connector.tools.checks.model_file import BrokenModelError
from continuum_connector.tools.checks.states import FULL, STATE
from continuum_connector.vllm.proven import FP8_DTYPES

SLIDING, MLA = "SlidingWindowSpec", "MLAAttentionSpec"
CHUNKED, CROSS = "ChunkedLocalAttentionSpec", "CrossAttentionSpec"
BLOCK_SIZE = 16  # tokens, for a model without states

# config.json's layer_types
_TYPES = {
    **dict.fromkeys(("full_attention", "attention", "global_attention"), FULL),
    **dict.fromkeys(("sliding_attention", "local_attention"), SLIDING),
    **dict.fromkeys(("mamba", "mamba2", "linear_attention", "conv", "recurrent"), STATE),
    "chunked_attention": CHUNKED,
}
# Models whose config.json does not say that every n-th layer is full, which transformers knows.
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}
_STATES = (  # keys that only models with layers of state have
    *("mamba_d_state", "ssm_state_size", "ssm_cfg", "attn_layer_period", "mamba_expand"),
    *("hybrid_override_pattern", "linear_num_key_heads", "linear_attn_config", "state_size"),
)
_UNEVEN = (  # keys of models whose layers have KV of different sizes
    *("global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads", "swa_head_dim"),
    *("block_configs", "compress_ratios", "num_key_value_heads_per_layer"),
)
# What vLLM serves with MLA: transformers_utils/model_arch_config_convertor.py, is_deepseek_mla.
_MLA = (
    *("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
    *("kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe", "bailing_hybrid"),
)
_INDEX_SHARED = ("index_topk_freq", "index_topk_pattern")  # some layers use another layer's index
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


MOST, MOST_LAYERS = 1 << 40, 100_000  # the largest number that we accept; the most layers


class ShapeError(ValueError):
    """This config.json does not say clearly what the KV cache will be."""


class Layer(NamedTuple):
    """`kind`: the class of vLLM's spec. `window`: how many tokens attention looks back, None:
    all."""

    kind: str
    window: int | None = None


@dataclass(frozen=True)
class Shape:
    """`layers`: those with KV of their own. `num_heads`: KV heads, 1 for MLA. `head_values`:
    numbers that a head keeps per token and layer. `value_bytes`: the size of one such number, 0 if
    we do not know it. `index_bytes`: the index that comes with MLA, per token and layer.
    `kv_cache_dtype`: the flag, or what the checkpoint asks for if the flag is auto.
    `attention_heads`: query heads, 0 if not given. `state_bytes`: a layer's state over all ranks, 0
    if there is none or we do not know."""

    architecture: str
    layers: tuple[Layer, ...]
    num_heads: int
    head_values: int
    value_bytes: int
    index_bytes: int
    kv_cache_dtype: str
    attention_heads: int = 0
    state_bytes: int = 0
    model_type: str = ""

    @property
    def num_states(self) -> int:
        """Layers that keep a state."""
        return sum(layer.kind == STATE for layer in self.layers)

    def block_size(self, tensor_parallel: int = 1) -> int:
        """Tokens of a block; 0 if it depends on a state whose size we do not know."""
        if not self.num_states:
            return BLOCK_SIZE
        token = self.token_bytes(tensor_parallel) / tensor_parallel
        if not self.state_bytes or not token:
            return 0
        is_latent = Layer(MLA) in self.layers
        return states.block_size(self.state_bytes / tensor_parallel, token, is_latent)

    def token_bytes(self, tensor_parallel: int = 1) -> int:
        """KV bytes of a token in one layer, over all ranks. If the heads do not divide, several
        ranks keep the same one; all ranks keep MLA's."""
        copies = max(1, tensor_parallel // self.num_heads)
        return self.num_heads * copies * (self.head_values * self.value_bytes + self.index_bytes)

    def context_bytes(self, num_tokens: int, tensor_parallel: int = 1) -> int:
        """KV bytes of a context that the next turn needs: all of it, or a layer's window, or a
        layer's state, which is padded to a block."""
        attention = (layer for layer in self.layers if layer.kind != STATE)
        kept = sum(min(num_tokens, layer.window or num_tokens) for layer in attention)
        kept += self.num_states * self.block_size(tensor_parallel)
        return kept * self.token_bytes(tensor_parallel)

    def new_bytes(self, num_tokens: int, tensor_parallel: int = 1) -> int:
        """KV bytes of the tokens that a turn adds, and of the states after them."""
        kept = (len(self.layers) - self.num_states) * num_tokens
        kept += self.num_states * self.block_size(tensor_parallel)
        return kept * self.token_bytes(tensor_parallel)


def read_shape(
    config: Mapping[str, Any],
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    hybrid_manager: bool = True,
    ssm_dtype: str = "auto",
) -> Shape:
    """Read config.json as vLLM would with these flags. Raises ShapeError."""
    text = {**config, **_part(config, "text_config")}
    _refuse(text)
    layers = _layers(text)
    if not hybrid_manager or any(layer.kind == CHUNKED for layer in layers):
        # vLLM turns its hybrid manager off for chunked attention, so every layer becomes full.
        layers = _promoted(layers)
    num_heads, head_values = _heads(text)
    has_states = any(layer.kind == STATE for layer in layers)
    plain_bytes = _value_bytes(text, dtype, "auto") if has_states else 0
    kv_cache_dtype = _resolved(text, kv_cache_dtype)
    return Shape(
        architecture=str(next(iter(_list(config, "architectures")), "?")),
        layers=tuple(layers),
        num_heads=num_heads,
        head_values=head_values,
        value_bytes=_value_bytes(text, dtype, kv_cache_dtype),
        index_bytes=_index_bytes(text, kv_cache_dtype),
        kv_cache_dtype=kv_cache_dtype,
        attention_heads=_number(text, "num_attention_heads", "n_head", "n_heads"),
        model_type=str(config.get("model_type") or ""),
        state_bytes=states.state_bytes(text, plain_bytes, ssm_dtype) if has_states else 0,
    )


def _refuse(text: Mapping[str, Any]) -> None:
    for key in _UNEVEN:
        if text.get(key) is not None:
            raise ShapeError(f"{key} is set: its layers keep KV of different sizes")
    if text.get("kv_lora_rank") is not None and text.get("model_type") not in _MLA:
        raise ShapeError(f"whether vLLM serves {text.get('model_type')} with MLA is not known here")


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The number under the first of these keys that has one; 0 if none does."""
    for name in names:
        value = text.get(name)
        if isinstance(value, list):
            raise ShapeError(f"{name} differs from layer to layer")
        if value is not None:
            return _count(name, value)
    return 0


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < MOST:
        said = repr(value)[:100]
        raise BrokenModelError(f"config.json is broken: {name} is {said}, which counts nothing")
    return value


def _list(text: Mapping[str, Any], name: str) -> list[Any]:
    """The list under this key; [] if there is none."""
    value = text.get(name) or []
    if not isinstance(value, list):
        raise BrokenModelError(f"config.json is broken: {name} is {repr(value)[:100]}, no list")
    return value


def _part(text: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under this key; {} if there is none."""
    value = text.get(name) or {}
    if not isinstance(value, dict):
        raise BrokenModelError(f"config.json is broken: {name} is {repr(value)[:100]}, no object")
    return value


def _layers(text: Mapping[str, Any]) -> list[Layer]:
    number = _number(text, "num_hidden_layers", "n_layer", "n_layers")
    number -= _number(text, "num_kv_shared_layers")
    if number <= 0:
        raise ShapeError("num_hidden_layers is missing")
    if text.get("is_encoder_decoder"):
        return [Layer(FULL)] * number + [Layer(CROSS)] * number
    if number > MOST_LAYERS:
        raise BrokenModelError(
            f"config.json is broken: {number} layers are more than any model has"
        )
    if types := _list(text, "layer_types"):
        return [_layer(text, each) for each in types[:number]]
    if kinds := states.kinds_by_pattern(text, number):
        full = Layer(MLA if text.get("kv_lora_rank") is not None else FULL)
        return [full if kind == FULL else Layer(kind) for kind in kinds]
    if any(text.get(key) for key in _STATES) or 0 in _list(text, "attn_type_list"):
        return [Layer(STATE)] * number
    if text.get("kv_lora_rank") is not None:
        return [Layer(MLA)] * number
    if text.get("attention_chunk_size"):
        return [Layer(CHUNKED)] * number
    return _windows(text, number)


def _layer(text: Mapping[str, Any], name: object) -> Layer:
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ShapeError(f"layer_types has {name!r}, which is not known here")
    if kind == FULL and text.get("kv_lora_rank") is not None:
        return Layer(MLA)
    return Layer(kind, _window(text) if kind == SLIDING else None)


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    return _number(text, "sliding_window") or None


def _windows(text: Mapping[str, Any], number: int) -> list[Layer]:
    """Which layers have the window, if layer_types does not say."""
    window = _window(text)
    if window is None:
        return [Layer(FULL)] * number
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if isinstance(pattern, str):  # "LLLG": local, global
        is_full = [pattern[i % len(pattern)] != "L" for i in range(number)]
    elif every := pattern or _FULL_EVERY.get(str(text.get("model_type"))):
        every = _count("sliding_window_pattern", every) or 1
        is_full = [(i + 1) % every == 0 for i in range(number)]
    else:
        first = _number(text, "max_window_layers") if text.get("use_sliding_window") else 0
        is_full = [i < first for i in range(number)]
    return [Layer(FULL) if full else Layer(SLIDING, window) for full in is_full]


def _promoted(layers: list[Layer]) -> list[Layer]:
    """Without the hybrid manager, layers of different kinds all become full attention."""
    local = {SLIDING, CHUNKED}
    kinds = {layer.kind for layer in layers}
    if len(kinds) == 1 and CHUNKED not in kinds:
        return layers
    return [Layer(FULL) if layer.kind in local else layer for layer in layers]


def _heads(text: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads, and how many numbers each keeps per token: keys and values, or MLA's one vector."""
    if rank := _number(text, "kv_lora_rank"):
        return 1, rank + _number(text, "qk_rope_head_dim")
    num_heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    head_dim = _number(text, "head_dim")
    if not head_dim and num_heads:
        head_dim = _number(text, "hidden_size", "n_embd", "d_model") // num_heads
    kv_heads = _number(text, *_KV_HEADS) or num_heads
    if not kv_heads or not head_dim:
        raise ShapeError("num_attention_heads or hidden_size is missing")
    return kv_heads, head_dim + (_number(text, "v_head_dim") or head_dim)


def _index_bytes(text: Mapping[str, Any], kv_cache_dtype: str) -> int:
    """Bytes per token of the keys by which DeepSeek's sparse attention chooses tokens: FP8, and a
    float per 128 of them (model_executor/models/deepseek_v2.py, Indexer)."""
    if not text.get("index_topk"):
        return 0
    if any(text.get(key) is not None for key in _INDEX_SHARED):
        raise ShapeError("not every layer keeps an index of its own")
    if kv_cache_dtype in FP8_DTYPES:
        raise ShapeError("how many bytes FP8 takes beside an index depends on the backend")
    keys = _number(text, "index_head_dim")
    return keys + keys // 128 * 4


def _resolved(text: Mapping[str, Any], kv_cache_dtype: str) -> str:
    """The type that --kv-cache-dtype resolves to: a checkpoint may ask for one itself
    (utils/torch_utils.py, get_kv_cache_quant_algo_string)."""
    quantised = _part(text, "quantization_config")
    wish = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
    if kv_cache_dtype != "auto" or not wish:
        return kv_cache_dtype
    if isinstance(wish, Mapping):
        return {8: "fp8", 4: "nvfp4"}.get(_number(wish, "num_bits"), "auto")
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(wish).lower(), "auto")


def _value_bytes(text: Mapping[str, Any], dtype: str, kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache, 0 if unknown. `kv_cache_dtype`: as resolved above."""
    if kv_cache_dtype in FP8_DTYPES:
        return 1
    if kv_cache_dtype != "auto":
        return DTYPE_BYTES.get(kv_cache_dtype, 0)
    if dtype == "auto":
        own = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if own.removeprefix("torch.") == "float32" else own
    if dtype.removeprefix("torch.") not in DTYPE_BYTES:
        raise ShapeError(f"how many bytes {dtype} takes in the KV cache is not known here")
    return DTYPE_BYTES[dtype.removeprefix("torch.")]


def count_kinds(shape: Shape) -> list[tuple[Layer, int]]:
    """Each kind of layer with its number of layers, the most common first."""
    return Counter(shape.layers).most_common()
