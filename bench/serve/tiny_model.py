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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.cache import CACHE
from bench.cli import start, teaching_parser
from bench.serve.tiny_weights import CONV, full_layers, weights
from bench.serve.tokenizer import BOS, EOS, PAD, write_tokenizer

MODELS = CACHE / "models"
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}


@dataclass(frozen=True)
class ModelShape:
    """What a tiny model looks like. `family`: a key of CONFIGS, which says whose it is like."""

    family: str = "llama"
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
    state_dim: int = 32  # of Mamba2's

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """KV cache per token over all layers (a hybrid keeps less: windows are cut)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


LLAMA = ModelShape()
SMALL = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, intermediate=256)
HYBRID = replace(SMALL, family="hybrid", layers=6, intermediate=512, window=128)
GPT_OSS = replace(SMALL, family="gpt_oss", window=128, full_every=2, experts=4)
# vLLM's gated delta nets for CPUs know --dtype bfloat16 only.
QWEN3_NEXT = replace(SMALL, family="qwen3_next", full_every=4, experts=4)
GRANITE = replace(SMALL, family="granite_hybrid", intermediate=512, full_every=4)
# A prompt of 3,000 tokens takes seconds on two cores, and reading its 24 MiB of KV milliseconds.
LARGE = ModelShape(layers=8, hidden=768, heads=12, kv_heads=2, intermediate=3072)
LLAMA_8B = ModelShape(  # Llama-3.1-8B: 128 KiB of KV per token in bfloat16
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocab=128_256,
    max_position=131_072,
)
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
    from safetensors.numpy import save_file

    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        draft.chmod(0o755)
        write_shape(draft, shape)
        tensors = dict(weights(shape))
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        os.replace(draft, folder)
    except OSError:
        if not folder.exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _sources() -> bytes:
    here = Path(__file__)
    sources = (here, here.with_name("tiny_weights.py"), here.with_name("tokenizer.py"))
    return b"".join(each.read_bytes() for each in sources)


def write_shape(folder: Path, shape: ModelShape) -> None:
    """A model but for its weights; vLLM makes some up with `--load-format dummy`."""
    config = {
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
        **CONFIGS[shape.family](shape),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder, shape.vocab, shape.max_position)


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": ROPE,
    }


def _layer_types(shape: ModelShape, others: str = "sliding_attention") -> list[str]:
    full = full_layers(shape)
    return ["full_attention" if i in full else others for i in range(shape.layers)]


def _gpt_oss_config(shape: ModelShape) -> dict[str, Any]:
    return {
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
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.window,
        "layer_types": _layer_types(shape),
        "rope_parameters": {
            "full_attention": ROPE | {"rope_theta": 1_000_000.0},
            "sliding_attention": ROPE,
        },
    }


def _qwen_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(shape, "linear_attention"),
        "rope_parameters": ROPE,
        "hidden_act": "silu",
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
        "layer_types": _layer_types(shape, "linear_attention"),
        "rope_parameters": ROPE,
        "hidden_act": "silu",
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


CONFIGS = {  # what config.json says beside that which all models say (write_shape)
    "llama": _llama_config,
    "hybrid": _gemma_config,  # Gemma 3, with a window
    "gpt_oss": _gpt_oss_config,  # with a window and experts
    "qwen3_next": _qwen_config,  # with the state of gated delta nets
    "granite_hybrid": _granite_config,  # Granite 4, with that of Mamba2
}


def main() -> None:
    """Write one, or find it written, and say where."""
    dummy = "write Llama-3.1-8B's shape there instead, without weights, for --load-format dummy"
    parser = teaching_parser("python -m bench.serve.tiny_model", __doc__)
    parser.add_argument("name", nargs="?", default="llama", choices=SHAPES)
    parser.add_argument("--llama-8b", type=Path, metavar="FOLDER", help=dummy)
    options = parser.parse_args()
    if folder := options.llama_8b:
        folder.mkdir(parents=True, exist_ok=True)
        write_shape(folder, LLAMA_8B)
    print(folder or make_model(SHAPES[options.name]))


if __name__ == "__main__":
    start(main, "python -m bench.serve.tiny_model")
