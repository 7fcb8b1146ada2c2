"""Tiny models with our own random weights: deterministic by seed, nothing downloaded.

The weights have enough spread that greedy output depends on every part of the prompt: a
cache that hands back wrong bytes changes the answer. They are stored as float32; serve them
with `--dtype float32`, where an answer hardly depends on how a prompt was split into batches.

    python -m bench.serve.tiny_model large     # writes it if need be; prints its folder
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cache import CACHE
from bench.cli import start, teaching_parser
from bench.serve.tiny_states import state_config, state_weights
from bench.serve.tokenizer import BOS, EOS, FIRST_WORD, PAD, write_tokenizer

MODELS = CACHE / "models"
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ModelShape:
    """What a tiny model looks like: like Llama's; with a `window` like Gemma 3's, and with
    `experts`, too, like gpt-oss; with the `state` of gated delta nets ("gdn") like Qwen3-Next,
    with that of "mamba2" like Granite 4."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1024
    vocab: int = 2048
    max_position: int = 8192
    seed: int = 7
    window: int = 0
    full_every: int = 6
    experts: int = 0
    state: str = ""
    state_dim: int = 32  # of Mamba2's

    @property
    def family(self) -> str:
        if self.state:
            return {"gdn": "qwen3_next", "mamba2": "granite_hybrid"}[self.state]
        if self.experts:
            return "gpt_oss"
        return "hybrid" if self.window else "llama"

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """KV cache per token over all layers (a hybrid keeps less: windows are cut)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


LLAMA = ModelShape()
HYBRID = ModelShape(hidden=256, heads=4, kv_heads=2, intermediate=512, window=128)
GPT_OSS = ModelShape(
    layers=4, hidden=256, heads=4, kv_heads=2, intermediate=256, window=128, full_every=2, experts=4
)
# vLLM's gated delta nets for CPUs know --dtype bfloat16 only.
QWEN3_NEXT = ModelShape(
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    intermediate=256,
    full_every=4,
    experts=4,
    state="gdn",
)
GRANITE = ModelShape(
    layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512, full_every=4, state="mamba2"
)
# A prompt of 3,000 tokens takes seconds on two cores, and reading its 24 MiB of KV milliseconds.
LARGE = ModelShape(layers=8, hidden=768, heads=12, kv_heads=2, intermediate=3072)
SHAPES = {
    "llama": LLAMA,
    "hybrid": HYBRID,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "granite": GRANITE,
    "large": LARGE,
}


def make_model(shape: ModelShape = LLAMA, root: Path = MODELS) -> Path:
    """Return the folder of a model of this shape, writing it first if it is not there.

    Safe to call from several processes: the folder appears whole, by one rename.
    """
    key = hashlib.sha256(json.dumps(asdict(shape)).encode() + _sources()).hexdigest()[:10]
    folder = root / f"{shape.family}-{key}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        _write(draft, shape)
        os.replace(draft, folder)
    except OSError:
        if not folder.exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _sources() -> bytes:
    here = Path(__file__)
    sources = (here, here.with_name("tiny_states.py"), here.with_name("tokenizer.py"))
    return b"".join(each.read_bytes() for each in sources)


def _write(folder: Path, shape: ModelShape) -> None:
    from safetensors.numpy import save_file

    folder.chmod(0o755)
    write_shape(folder, shape)
    weights = {"gpt_oss": _gpt_oss_weights, "llama": _weights, "hybrid": _weights}
    tensors = weights.get(shape.family, _state_weights)(shape)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def write_shape(folder: Path, shape: ModelShape) -> None:
    """A model but for its weights; vLLM makes some up with `--load-format dummy`."""
    make = {"llama": _llama_config, "hybrid": _gemma_config, "gpt_oss": _gpt_oss_config}
    config = make.get(shape.family, _state_config)(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder, shape.vocab, shape.max_position)


def _common_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    return _common_config(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    }


def _layer_types(shape: ModelShape) -> list[str]:
    return [
        "full_attention" if (i + 1) % shape.full_every == 0 else "sliding_attention"
        for i in range(shape.layers)
    ]


def _gpt_oss_config(shape: ModelShape) -> dict[str, Any]:
    return _common_config(shape) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "sliding_window": shape.window,
        "layer_types": _layer_types(shape),
        "num_local_experts": shape.experts,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


def _gemma_config(shape: ModelShape) -> dict[str, Any]:
    return _common_config(shape) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.window,
        "layer_types": _layer_types(shape),
        "rope_parameters": {
            kind: {"rope_theta": theta, "rope_type": "default"}
            for kind, theta in (("full_attention", 1_000_000.0), ("sliding_attention", 10_000.0))
        },
    }


def _state_config(shape: ModelShape) -> dict[str, Any]:
    return _common_config(shape) | state_config(shape)


def _matrices(shape: ModelShape) -> Callable[..., Array]:
    """Return what makes matrices, always the same ones in the same order."""
    rng = np.random.default_rng(shape.seed)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> Array:
        values: Array = rng.standard_normal((rows, cols), dtype=np.float32)
        values *= np.float32(gain / cols**0.5)
        return values

    return matrix


def _weights(shape: ModelShape) -> Iterator[tuple[str, Array]]:
    """Yield every tensor by its checkpoint name, always in the same order."""
    matrix = _matrices(shape)
    # Gemma multiplies embeddings by sqrt(hidden) and stores its norm weights minus one.
    gemma = shape.window > 0
    norm = np.full(shape.hidden, 0.0 if gemma else 1.0, dtype=np.float32)
    head_norm = np.zeros(shape.head_dim, dtype=np.float32)
    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden, 1.0 if gemma else 16.0)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for name in norms:
            yield f"{at}{name}.weight", norm.copy()
        # Sharp queries and strong values: attention looks somewhere, and it matters where.
        yield f"{at}self_attn.q_proj.weight", matrix(q_rows, shape.hidden, 2.0)
        yield f"{at}self_attn.k_proj.weight", matrix(kv_rows, shape.hidden, 2.0)
        yield f"{at}self_attn.v_proj.weight", matrix(kv_rows, shape.hidden, 1.5)
        yield f"{at}self_attn.o_proj.weight", matrix(shape.hidden, q_rows, 1.5)
        if gemma:
            yield f"{at}self_attn.q_norm.weight", head_norm + np.float32(0.5)
            yield f"{at}self_attn.k_norm.weight", head_norm + np.float32(0.5)
        yield f"{at}mlp.gate_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{at}mlp.up_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{at}mlp.down_proj.weight", matrix(shape.hidden, shape.intermediate)
    yield "model.norm.weight", norm.copy()
    yield "lm_head.weight", _head(shape, matrix)


def _gpt_oss_weights(shape: ModelShape) -> Iterator[tuple[str, Array]]:
    """The same of gpt-oss: experts in one tensor (rows are inputs), biases, sinks."""
    matrix = _matrices(shape)
    norm = np.ones(shape.hidden, dtype=np.float32)
    rows = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden, 16.0)
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", norm.copy()
        for name, heads in rows.items():
            out = heads * shape.head_dim
            yield f"{at}self_attn.{name}_proj.weight", matrix(out, shape.hidden, 2.0)
            yield f"{at}self_attn.{name}_proj.bias", matrix(1, out)[0]
        out = shape.heads * shape.head_dim
        yield f"{at}self_attn.o_proj.weight", matrix(shape.hidden, out, 1.5)
        yield f"{at}self_attn.o_proj.bias", matrix(1, shape.hidden)[0]
        yield f"{at}self_attn.sinks", matrix(1, shape.heads)[0]
        yield f"{at}mlp.router.weight", matrix(shape.experts, shape.hidden)
        yield f"{at}mlp.router.bias", matrix(1, shape.experts)[0]
        both = shape.experts, shape.hidden, 2 * shape.intermediate
        up = matrix(both[0] * both[2], both[1]).reshape(both[0], both[2], both[1])
        yield f"{at}mlp.experts.gate_up_proj", up.transpose(0, 2, 1).copy()
        yield f"{at}mlp.experts.gate_up_proj_bias", matrix(both[0], both[2])
        down = matrix(both[0] * shape.hidden, shape.intermediate)
        down = down.reshape(shape.experts, shape.hidden, shape.intermediate)
        yield f"{at}mlp.experts.down_proj", down.transpose(0, 2, 1).copy()
        yield f"{at}mlp.experts.down_proj_bias", matrix(shape.experts, shape.hidden)
    yield "model.norm.weight", norm.copy()
    yield "lm_head.weight", _head(shape, matrix)


def _state_weights(shape: ModelShape) -> Iterator[tuple[str, Array]]:
    matrix = _matrices(shape)
    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden, 16.0)
    yield from state_weights(shape, matrix)
    yield "lm_head.weight", _head(shape, matrix)


def _head(shape: ModelShape, matrix: Callable[..., Array]) -> Array:
    head = matrix(shape.vocab, shape.hidden, 4.0)
    head[:FIRST_WORD] = 0.0  # answers are words only: they read back as the same tokens
    return head


def main() -> None:
    """Write one, or find it written, and say where."""
    parser = teaching_parser("python -m bench.serve.tiny_model", __doc__)
    parser.add_argument("name", nargs="?", default="llama", choices=SHAPES)
    print(make_model(SHAPES[parser.parse_args().name]))


if __name__ == "__main__":
    start(main, "python -m bench.serve.tiny_model")
