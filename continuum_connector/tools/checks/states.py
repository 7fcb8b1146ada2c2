"""States: which layers of a model keep one, how large it is, and how large it makes vLLM's blocks.

vLLM raises attention's block until a layer's page holds a state, and pads the state to that page
(platforms/interface.py, _align_hybrid_block_size): a state costs as much as a block of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, STATE = "FullAttentionSpec", "MambaSpec"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ATTENTION_STEP, _MLA_STEP = 16, 128  # tokens; a block is a multiple of it
_LARGEST_UNIT = 64


def kinds_by_pattern(text: Mapping[str, Any], number: int) -> list[str]:
    """Each layer's kind, for known models without layer_types; [] for others. Layers that keep
    nothing, because they have only experts, are left out."""
    if pattern := text.get("hybrid_override_pattern"):  # Nemotron-H: M, *, and - or E
        return [{"M": STATE, "*": FULL}[each] for each in str(pattern) if each in "M*"]
    parts = text.get("linear_attn_config")
    if isinstance(parts, dict) and isinstance(parts.get("full_attn_layers"), list):  # Kimi Linear
        full = set(parts["full_attn_layers"])
        return [FULL if i + 1 in full else STATE for i in range(number)]
    every = text.get("full_attention_interval")
    if isinstance(every, int) and every > 0:  # Qwen3-Next
        return [FULL if (i + 1) % every == 0 else STATE for i in range(number)]
    return []


def state_bytes(text: Mapping[str, Any], value_bytes: int, ssm_dtype: str) -> int:
    """Bytes of one layer's state over all ranks; 0 if we do not know them.

    `value_bytes`: size of a number of the model. `ssm_dtype`: --mamba-ssm-cache-dtype. The shapes
    are those of model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator.
    """
    if found := _gated_delta_net(text) or _kimi_delta(text) or _mamba2(text):
        conv, ssm, default = found
        named = ssm_dtype if ssm_dtype != "auto" else str(default or "")
        return conv * value_bytes + ssm * _BYTES.get(named, value_bytes)
    return 0


def block_size(state: float, token: float, is_latent: bool) -> int:
    """Tokens of a block. `state` and `token`: bytes in one layer on one rank."""
    step = _MLA_STEP if is_latent else _ATTENTION_STEP
    return step * -int(-state // (step * token))


def match_unit(size: int) -> int:
    """The largest --prefix-match-unit for blocks of this size: a power of two that divides it."""
    return min(_LARGEST_UNIT, size & -size)


Values = tuple[int, int, object]  # numbers in a convolution, in a state; the state's own type


def _gated_delta_net(text: Mapping[str, Any]) -> Values | None:
    """Qwen3-Next, Qwen3.5 and later."""
    keys, values = _counts(text, "linear_num_key_heads", "linear_num_value_heads")
    of_key, of_value = _counts(text, "linear_key_head_dim", "linear_value_head_dim")
    (width,) = _counts(text, "linear_conv_kernel_dim")
    if not keys * values * of_key * of_value * width:
        return None
    conv = (width - 1) * (2 * keys * of_key + values * of_value)
    return conv, values * of_key * of_value, text.get("mamba_ssm_dtype")


def _kimi_delta(text: Mapping[str, Any]) -> Values | None:
    parts = text.get("linear_attn_config")
    if not isinstance(parts, dict):
        return None
    heads, dim, width = _counts(parts, "num_heads", "head_dim", "short_conv_kernel_size")
    if not heads * dim * width:
        return None
    return 3 * (width - 1) * heads * dim, heads * dim * dim, "float32"


_NEMOTRON_H = "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
_GRANITE = "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"


def _mamba2(text: Mapping[str, Any]) -> Values | None:
    """Nemotron-H and Granite 4, which name the same things differently."""
    for names, default in ((_NEMOTRON_H, "float32"), (_GRANITE, "")):
        heads, dim, size, groups, width = _counts(text, *names)
        if heads * dim * size * groups * width:
            conv = (width - 1) * (heads * dim + 2 * groups * size)
            return conv, heads * dim * size, text.get("mamba_ssm_cache_dtype") or default
    return None


def _counts(text: Mapping[str, Any], *names: str) -> list[int]:
    """Counts from config.json; 0 for each that is not a number."""
    found = [text.get(name) for name in names]
    return [each if isinstance(each, int) and each > 0 else 0 for each in found]
