"""KV: what a model keeps of its tokens, in bytes and in words. vLLM says it (`Kv`); where there is
no vLLM, config.json alone, of models whose layers all keep a key and a value of one size for every
token. For all others ShapeError: no answer is better than a wrong one. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum_connector.scheduler.kv_groups import STATE
from continuum_connector.tools.checks.line import several
from continuum_connector.tools.checks.machine import Kv
from continuum_connector.vllm.proven import FP8_DTYPES, KINDS

MAX_BYTES = 16 << 20  # of a config.json; the largest are a few hundred KB
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
_LARGEST_UNIT = 64
FULL = "FullAttentionSpec"
_WORDS = {
    FULL: "full attention",
    "MLAAttentionSpec": "latent attention (MLA)",
    "MambaSpec": "states",
}


# --- as vLLM makes it -----------------------------------------------------------------------
def token_bytes(kv: Kv) -> float:
    """What one more token takes, over all ranks, in groups that keep all tokens."""
    kept = [size for kind, size, _ in kv.groups if KINDS.get(kind, kind) == KINDS[FULL]]
    return sum(kv.block_bytes / size for size in kept)


def state_blocks(kv: Kv) -> list[int]:
    """Tokens between two states that are kept, of each group of states."""
    return [size for kind, size, _ in kv.groups if KINDS.get(kind, kind) == STATE]


def context_bytes(kv: Kv, num_tokens: int) -> int:
    """What the next turn needs of a context: whole blocks, as a tier keeps them. Of a window or a
    chunk as many as it reaches, of states one."""
    num_blocks = len(state_blocks(kv))
    for kind, size, reach in kv.groups:
        if KINDS.get(kind, kind) != STATE:
            num_blocks += -(-min(num_tokens, reach or num_tokens) // size)
    return kv.block_bytes * num_blocks


def new_bytes(kv: Kv, num_tokens: int) -> float:
    """What a turn of so many tokens adds, and the states after it."""
    grow = [size for kind, size, _ in kv.groups if KINDS.get(kind, kind) != STATE]
    return kv.block_bytes * (sum(num_tokens / size for size in grow) + len(state_blocks(kv)))


def match_unit(size: int) -> int:
    """The largest --prefix-match-unit for blocks of this size: a power of two that divides it."""
    return min(_LARGEST_UNIT, size & -size)


def in_words(kv: Kv) -> str:
    """ "36 layers of full attention, 12 layers with a window of 128"."""
    said = []
    for kind, reach, number in kv.layers:
        what = f"with a window of {reach:,}" if reach else f"of {_WORDS.get(kind, kind)}"
        what = f"in chunks of {reach or 0:,}" if "Chunked" in kind else what
        said.append(f"{several('layer', number)} {what}")
    return ", ".join(said)


# --- as config.json says --------------------------------------------------------------------
class NoModelError(ValueError):
    """No config.json can be read here; the message says where we looked."""


class BrokenModelError(NoModelError):
    """The model is here, but no server starts with its config.json."""


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


def read_model_config(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the model's config.json. `model`: a folder, its config.json, or a name on the Hub."""
    found = _find(model, environ)
    try:
        with found.open("rb") as file:
            config = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise BrokenModelError(f"{found} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else error
        raise BrokenModelError(f"{found} is no JSON ({why})") from None
    if not isinstance(config, dict):
        raise BrokenModelError(f"{found} is no JSON object")
    return config


def _find(model: str, environ: Mapping[str, str]) -> Path:
    """The file, in a folder or in the cache of downloads."""
    try:
        path = Path(model).expanduser()
        file = path if path.suffix == ".json" else path / "config.json"
        if file.is_file():
            return file
        exists, is_other = path.exists(), path.is_file() or (path / "params.json").is_file()
    except (OSError, RuntimeError) as error:  # the name is too long, or `~` names no user
        raise BrokenModelError(f"{model} is no folder ({error})") from None
    if is_other:
        raise NoModelError(f"{model} has no config.json, and other formats are not read here")
    if exists:
        raise BrokenModelError(f"there is no config.json in {model}, so no server starts with it")
    if model.startswith(("/", ".", "~")):
        raise BrokenModelError(f"there is no folder {model}, so no server starts with it")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise NoModelError(f"{model} is no folder, and huggingface_hub is not installed") from None
    cache = environ.get("HF_HUB_CACHE") or None
    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache)
    except HFValidationError:
        raise BrokenModelError(f"{model!r} is neither a folder nor a name on the Hub") from None
    except OSError as error:
        raise NoModelError(f"{model} cannot be looked up ({error.strerror})") from None
    if not isinstance(found, str):
        raise NoModelError(f"{model} is no folder, and is not downloaded here")
    return Path(found)


def read_shape(config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> Shape:
    """Read config.json as vLLM would with this type of the KV cache. Raises ShapeError."""
    heads, layers = _number(config, "num_attention_heads"), _number(config, "num_hidden_layers")
    kv_heads = _number(config, "num_key_value_heads") or heads
    if layers > MOST_LAYERS:
        raise _broken(f"{layers} layers are more than any model has")
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
        raise _broken("architectures is no list")
    num_bytes = 2 * kv_heads * size * _value_bytes(config, kv_cache_dtype)
    return Shape(str(architectures[0]), layers, kv_heads, num_bytes)


def _broken(why: str) -> BrokenModelError:
    return BrokenModelError(f"config.json is broken: {why}")


def _number(config: Mapping[str, Any], name: str) -> int:
    """The number under this key; 0 if there is none."""
    value = config.get(name)
    if isinstance(value, list):
        raise ShapeError(f"{name} differs from layer to layer")
    if value is not None and (not isinstance(value, int) or not 0 <= value < MOST):
        raise _broken(f"{name} is {repr(value)[:100]}, which counts nothing")
    return value or 0


def _value_bytes(config: Mapping[str, Any], kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache. A checkpoint may ask for a type of its own."""
    if kv_cache_dtype in FP8_DTYPES:
        return 1
    if kv_cache_dtype == "auto":
        if config.get("quantization_config"):
            raise ShapeError("quantization_config may name the type of the KV cache")
        own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = own.removeprefix("torch.")
        kv_cache_dtype = "bfloat16" if dtype == "float32" else dtype
    if kv_cache_dtype not in _BYTES:
        raise ShapeError(f"how many bytes {kv_cache_dtype} takes is not known without vLLM")
    return _BYTES[kv_cache_dtype]
