"""Weights of the tiny models: random, always the same, and such that answers depend on all that is
computed.

Queries are sharp and values strong: attention looks somewhere, and it matters where. Where layers
keep a state, some heads forget within a token and some remember hundreds, so an answer depends on
the newest tokens and on old ones through the state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.serve.tokenizer import FIRST_WORD

if TYPE_CHECKING:
    from bench.serve.tiny_model import ModelShape

Array = npt.NDArray[np.float32]
Matrix = Callable[..., Array]
Tensors = Iterator[tuple[str, Array]]
CONV = 4  # tokens that a layer's short convolution sees
FORGETS = np.log(
    np.array([0.003, 0.01, 0.03, 0.3], dtype=np.float32)
)  # A_log of a head; the next four again


def weights(shape: ModelShape) -> Tensors:
    """Yield every tensor by its checkpoint name, always in the same order."""
    rng = np.random.default_rng(shape.seed)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> Array:
        values: Array = rng.standard_normal((rows, cols), dtype=np.float32)
        values *= np.float32(gain / cols**0.5)
        return values

    is_gemma = shape.family == "hybrid"  # embeddings times sqrt(hidden), norms stored minus one
    is_minus_one = is_gemma or shape.family == "qwen3_next"
    norm = np.full(shape.hidden, 0.0 if is_minus_one else 1.0, dtype=np.float32)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention, state, mlp = PARTS[shape.family]
    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden, 1.0 if is_gemma else 16.0)
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for name in norms:
            yield f"{at}{name}.weight", norm.copy()
        yield from (attention if i in full_layers(shape) else state)(shape, at, matrix)
        yield from mlp(shape, at, matrix)
    yield "model.norm.weight", norm.copy()
    head = matrix(shape.vocab, shape.hidden, 4.0)
    head[:FIRST_WORD] = 0.0  # answers are words only: they read back as the same tokens
    yield "lm_head.weight", head


def full_layers(shape: ModelShape) -> range:
    """Those with full attention, among layers of another kind."""
    return range(shape.full_every - 1, shape.layers, shape.full_every)


def _attention(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    is_gated, at = shape.family == "qwen3_next", f"{at}self_attn."
    yield f"{at}q_proj.weight", matrix(rows * (2 if is_gated else 1), shape.hidden, 2.0)
    yield f"{at}k_proj.weight", matrix(kv_rows, shape.hidden, 2.0)
    yield f"{at}v_proj.weight", matrix(kv_rows, shape.hidden, 1.5)
    yield f"{at}o_proj.weight", matrix(shape.hidden, rows, 1.5)
    if is_gated or shape.family == "hybrid":
        yield f"{at}q_norm.weight", np.full(shape.head_dim, 0.5, dtype=np.float32)
        yield f"{at}k_norm.weight", np.full(shape.head_dim, 0.5, dtype=np.float32)


def _attention_with_sinks(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    rows, at = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}, f"{at}self_attn."
    for name, heads in rows.items():
        yield f"{at}{name}_proj.weight", matrix(heads * shape.head_dim, shape.hidden, 2.0)
        yield f"{at}{name}_proj.bias", matrix(1, heads * shape.head_dim)[0]
    yield f"{at}o_proj.weight", matrix(shape.hidden, shape.heads * shape.head_dim, 1.5)
    yield f"{at}o_proj.bias", matrix(1, shape.hidden)[0]
    yield f"{at}sinks", matrix(1, shape.heads)[0]


def _delta_net(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    keys, values = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    at = f"{at}linear_attn."
    yield f"{at}in_proj_qkvz.weight", matrix(2 * keys + 2 * values, shape.hidden, 1.5)
    yield f"{at}in_proj_ba.weight", matrix(2 * shape.heads, shape.hidden)
    yield f"{at}conv1d.weight", matrix(2 * keys + values, CONV, 1.5).reshape(-1, 1, CONV)
    yield f"{at}dt_bias", matrix(1, shape.heads)[0]
    yield f"{at}A_log", np.resize(FORGETS, shape.heads)
    yield f"{at}norm.weight", np.ones(shape.head_dim, dtype=np.float32)
    yield f"{at}out_proj.weight", matrix(shape.hidden, values, 2.0)


def _mamba(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    inner, heads = 2 * shape.hidden, 2 * shape.hidden // shape.head_dim
    conv, at = inner + 2 * shape.state_dim, f"{at}mamba."
    yield f"{at}in_proj.weight", matrix(inner + conv + heads, shape.hidden, 1.5)
    yield f"{at}conv1d.weight", matrix(conv, CONV, 1.5).reshape(-1, 1, CONV)
    yield f"{at}conv1d.bias", matrix(1, conv)[0]
    yield f"{at}dt_bias", matrix(1, heads)[0]
    yield f"{at}A_log", np.resize(FORGETS, heads)
    yield f"{at}D", np.ones(heads, dtype=np.float32)
    yield f"{at}norm.weight", np.ones(inner, dtype=np.float32)
    yield f"{at}out_proj.weight", matrix(shape.hidden, inner, 2.0)


def _mlp(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    yield f"{at}mlp.gate_proj.weight", matrix(shape.intermediate, shape.hidden)
    yield f"{at}mlp.up_proj.weight", matrix(shape.intermediate, shape.hidden)
    yield f"{at}mlp.down_proj.weight", matrix(shape.hidden, shape.intermediate)


def _shared_mlp(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    yield f"{at}shared_mlp.input_linear.weight", matrix(2 * shape.intermediate, shape.hidden)
    yield f"{at}shared_mlp.output_linear.weight", matrix(shape.hidden, shape.intermediate)


def _experts(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    yield f"{at}mlp.gate.weight", matrix(shape.experts, shape.hidden)
    yield f"{at}mlp.shared_expert_gate.weight", matrix(1, shape.hidden)
    for expert in ("shared_expert", *(f"experts.{e}" for e in range(shape.experts))):
        for name in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{expert}.{name}.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{at}mlp.{expert}.down_proj.weight", matrix(shape.hidden, shape.intermediate)


def _experts_in_one(shape: ModelShape, at: str, matrix: Matrix) -> Tensors:
    """All of gpt-oss's experts in one tensor, whose rows are inputs."""
    experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    yield f"{at}mlp.router.weight", matrix(experts, hidden)
    yield f"{at}mlp.router.bias", matrix(1, experts)[0]
    up = matrix(experts * 2 * inner, hidden).reshape(experts, 2 * inner, hidden)
    yield f"{at}mlp.experts.gate_up_proj", up.transpose(0, 2, 1).copy()
    yield f"{at}mlp.experts.gate_up_proj_bias", matrix(experts, 2 * inner)
    yield (
        f"{at}mlp.experts.down_proj",
        matrix(experts * hidden, inner).reshape(experts, hidden, inner).transpose(0, 2, 1).copy(),
    )
    yield f"{at}mlp.experts.down_proj_bias", matrix(experts, hidden)


PARTS = {  # by family: of a layer with full attention, of another one, of both
    "llama": (_attention, _attention, _mlp),
    "hybrid": (_attention, _attention, _mlp),
    "gpt_oss": (_attention_with_sinks, _attention_with_sinks, _experts_in_one),
    "qwen3_next": (_attention, _delta_net, _experts),
    "granite_hybrid": (_attention, _mamba, _shared_mlp),
}
