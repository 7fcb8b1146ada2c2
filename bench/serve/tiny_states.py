"""Tiny models whose layers keep a state: like Qwen3-Next's (gated delta nets) and Granite 4's
(Mamba2), every fourth layer with attention. `tiny_model` writes them as it writes the others.

Some heads forget within a token and some remember hundreds, so an answer depends on the newest
tokens and on old ones through the state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bench.serve.tiny_model import ModelShape

Array = npt.NDArray[np.float32]
Matrix = Callable[..., Array]
CONV = 4  # tokens that a layer's short convolution sees
FORGETS = np.log(
    np.array([0.003, 0.01, 0.03, 0.3], dtype=np.float32)
)  # A_log of a head; the next four again


def state_config(shape: ModelShape) -> dict[str, Any]:
    """What config.json says beside that which all models say."""
    kinds = ["linear_attention"] * shape.layers
    kinds[shape.full_every - 1 :: shape.full_every] = ["full_attention"] * len(_full_layers(shape))
    rope = {"rope_theta": 10_000.0, "rope_type": "default"}
    found = {"layer_types": kinds, "rope_parameters": rope, "hidden_act": "silu"}
    return found | (_qwen_config(shape) if shape.family == "qwen3_next" else _granite_config(shape))


def state_weights(shape: ModelShape, matrix: Matrix) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of the layers by its checkpoint name, always in the same order."""
    is_qwen = shape.family == "qwen3_next"
    norm = np.full(shape.hidden, 0.0 if is_qwen else 1.0, dtype=np.float32)
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", norm.copy()
        if i in _full_layers(shape):
            yield from _attention(shape, f"{at}self_attn.", matrix, is_qwen)
        elif is_qwen:
            yield from _delta_net(shape, f"{at}linear_attn.", matrix)
        else:
            yield from _mamba(shape, f"{at}mamba.", matrix)
        yield from (_experts if is_qwen else _mlp)(shape, at, matrix)
    yield "model.norm.weight", norm.copy()


def _full_layers(shape: ModelShape) -> range:
    return range(shape.full_every - 1, shape.layers, shape.full_every)


def _qwen_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_num_key_heads": shape.kv_heads,
        "linear_num_value_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate,
        "shared_expert_intermediate_size": shape.intermediate,
    }


def _granite_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_multiplier": shape.head_dim**-0.5,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": shape.intermediate,
        "mamba_n_heads": 2 * shape.hidden // shape.head_dim,
        "mamba_d_head": shape.head_dim,
        "mamba_d_state": shape.state_dim,
        "mamba_d_conv": CONV,
        "mamba_expand": 2,
        # vLLM's scan for CPUs gives one state per sequence: a chunk must hold a whole prefill.
        "mamba_chunk_size": shape.max_position,
    }


def _attention(
    shape: ModelShape, at: str, matrix: Matrix, is_gated: bool
) -> Iterator[tuple[str, Array]]:
    rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield f"{at}q_proj.weight", matrix(rows * (2 if is_gated else 1), shape.hidden, 2.0)
    yield f"{at}k_proj.weight", matrix(kv_rows, shape.hidden, 2.0)
    yield f"{at}v_proj.weight", matrix(kv_rows, shape.hidden, 1.5)
    yield f"{at}o_proj.weight", matrix(shape.hidden, rows, 1.5)
    if is_gated:
        yield f"{at}q_norm.weight", np.full(shape.head_dim, 0.5, dtype=np.float32)
        yield f"{at}k_norm.weight", np.full(shape.head_dim, 0.5, dtype=np.float32)


def _delta_net(shape: ModelShape, at: str, matrix: Matrix) -> Iterator[tuple[str, Array]]:
    keys, values = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    yield f"{at}in_proj_qkvz.weight", matrix(2 * keys + 2 * values, shape.hidden, 1.5)
    yield f"{at}in_proj_ba.weight", matrix(2 * shape.heads, shape.hidden)
    yield f"{at}conv1d.weight", matrix(2 * keys + values, CONV, 1.5).reshape(-1, 1, CONV)
    yield f"{at}dt_bias", matrix(1, shape.heads)[0]
    yield f"{at}A_log", np.resize(FORGETS, shape.heads)
    yield f"{at}norm.weight", np.ones(shape.head_dim, dtype=np.float32)
    yield f"{at}out_proj.weight", matrix(shape.hidden, values, 2.0)


def _mamba(shape: ModelShape, at: str, matrix: Matrix) -> Iterator[tuple[str, Array]]:
    inner, heads = 2 * shape.hidden, 2 * shape.hidden // shape.head_dim
    conv = inner + 2 * shape.state_dim
    yield f"{at}in_proj.weight", matrix(inner + conv + heads, shape.hidden, 1.5)
    yield f"{at}conv1d.weight", matrix(conv, CONV, 1.5).reshape(-1, 1, CONV)
    yield f"{at}conv1d.bias", matrix(1, conv)[0]
    yield f"{at}dt_bias", matrix(1, heads)[0]
    yield f"{at}A_log", np.resize(FORGETS, heads)
    yield f"{at}D", np.ones(heads, dtype=np.float32)
    yield f"{at}norm.weight", np.ones(inner, dtype=np.float32)
    yield f"{at}out_proj.weight", matrix(shape.hidden, inner, 2.0)


def _experts(shape: ModelShape, at: str, matrix: Matrix) -> Iterator[tuple[str, Array]]:
    yield f"{at}mlp.gate.weight", matrix(shape.experts, shape.hidden)
    yield f"{at}mlp.shared_expert_gate.weight", matrix(1, shape.hidden)
    for expert in ("shared_expert", *(f"experts.{e}" for e in range(shape.experts))):
        for name in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{expert}.{name}.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{at}mlp.{expert}.down_proj.weight", matrix(shape.hidden, shape.intermediate)


def _mlp(shape: ModelShape, at: str, matrix: Matrix) -> Iterator[tuple[str, Array]]:
    yield f"{at}shared_mlp.input_linear.weight", matrix(2 * shape.intermediate, shape.hidden)
    yield f"{at}shared_mlp.output_linear.weight", matrix(shape.hidden, shape.intermediate)
