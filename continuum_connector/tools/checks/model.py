"""Lines on the model: its KV groups, and whether the connector supports it.

vLLM says what a model keeps of its tokens (vllm/planned.py, `Kv`). Where it cannot be asked,
config.json is read for what it proves alone, of models whose layers all keep a key and a value of
one size for every token. For all others ShapeError: no answer is better than a wrong one. Nothing
is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from continuum_connector.memory import size
from continuum_connector.scheduler.kv_groups import STATE
from continuum_connector.tools.checks import Line, error, ok, several, unseen, warning
from continuum_connector.tools.checks.machine import Kv, Machine, VllmSeen
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.vllm import proven
from continuum_connector.vllm.proven import FP8_DTYPES, KINDS, Group, Server

LOG = "the server's log says `steps aside` if it does not"
MODELOPT = "hf_quant_config.json"  # beside config.json
MAX_BYTES = 16 << 20  # of a config.json; the largest are a few hundred KB
BLOCK_SIZE = 16  # tokens
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


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    kv = kv_of(machine, plan, vllm)
    if isinstance(kv, Line):
        yield kv
        # What is known without a model: its layers are taken for full attention.
        seen = _server(plan, vllm)
        yield from _tiers(plan, proven.why_no_tier(seen), proven.why_no_disk(seen))
        return
    text = f"{kv.architecture} is served: {in_words(kv)}; {size(token_bytes(kv))} per token"
    if states := state_blocks(kv):
        num_bytes = size(kv.block_bytes * len(states))
        text += f", {num_bytes} of states per turn, blocks of {max(states):,} tokens"
    says = f"as vLLM makes them on {kv.device}" if kv.device else "by config.json alone"
    served = ok("model", f"{text}, {says}")
    if kv.aside and kv.aside != proven.why_aside(False, ""):  # of which another line speaks
        cure = "none yet: it works, as without the connector"
        served = error("model", f"the connector steps aside: {kv.aside}", cure)
    yield served
    if kv.aside:
        return
    if states:
        yield from _states(plan, kv, max(states))
    yield from _tiers(plan, kv.no_tier, kv.no_disk)


def _tiers(plan: Plan, no_tier: str, no_disk: str) -> Iterator[Line]:
    """The tiers that are asked for and refused. Without a DRAM tier nothing is said of the disk."""
    cure = "set dram_bytes = 0, or serve without what it names"
    if no_tier and plan.config.dram_bytes is None:
        yield warning("DRAM tier", no_tier, cure)
    elif no_tier and plan.config.dram_bytes:
        yield error("DRAM tier", no_tier, cure)
    elif plan.config.disk_path and no_disk:
        yield error("disk tier", no_disk, "leave disk_path and disk_bytes out, or what it names")


def _server(plan: Plan, vllm: VllmSeen) -> Server:
    """The server of a model with full attention."""
    return Server(
        kv_cache_dtype=plan.kv_cache_dtype,
        pipeline_parallel=plan.pipeline_parallel_size,
        executor=plan.distributed_executor_backend,
        has_drafts=plan.drafts,
        has_lora=plan.enable_lora,
        fails_by_request=vllm.fails_by_request or not vllm.version,  # unseen: do not blame it
        leaves_right_states=vllm.mends_drafted_states or not vllm.version,
    )


def kv_of(machine: Machine, plan: Plan, vllm: VllmSeen) -> Kv | Line:
    """What vLLM keeps of this model's tokens; where it makes no KV cache of it here, what
    config.json alone says; or why nobody can tell."""
    if plan.hides_its_model:
        text = "only who runs it knows which; vLLM's own default is not what is meant"
        return unseen("model", text, "paste it with the model's name, or give --model")
    if vllm.kv is not None:
        return vllm.kv
    model = plan.model or vllm.model
    try:
        if not model:
            raise NoModelError("none was named, so its KV groups are not known")
        config = read_model_config(model, machine.environ)
        if vllm.refused:
            return unseen("model", "not looked at, because vLLM refuses the options", "mend them")
        if vllm.not_seen:
            text = f"this vLLM cannot say here what its layers keep: {vllm.not_seen[:400]}"
            return unseen("model", text, LOG)
        return by_config(config, plan, vllm)
    except BrokenModelError as why:
        if plan.is_inside and model.startswith(("/", ".", "~")):
            text = f"{model} is a path in the container, so it is not seen from here"
            return unseen("model", text, "run this inside the container, or give --model")
        cure = "mend it, or name another --model: vLLM reads the same file"
        return error("model", str(why), cure)
    except NoModelError as why:
        cure = "--model FOLDER with its config.json; nothing is downloaded for a check"
        return unseen("model", str(why), cure)
    except ShapeError as why:
        text = f"whether it is served cannot be told from config.json alone: {why}"
        return unseen("model", text, LOG)


def _states(plan: Plan, kv: Kv, block: int) -> Iterator[Line]:
    """What to set for a model with states, because its blocks are large: how much of its
    predecessor's context a turn computes again (docs/models.md)."""
    unit = match_unit(block)
    text = f"a turn goes on from a block of {block:,} tokens: it computes up to that many again"
    text += f", {block // 2:,} in the mean"
    if kv.server.get("has_drafts"):
        text += " and, with speculative decoding, the last answer"
    if plan.prefix_match_unit:
        text += f"; or the last answer and {plan.prefix_match_unit // 2} tokens, if less"
        yield ok("states", text)
    else:
        least = block // 2 - unit // 2
        cure = f"--prefix-match-unit {unit} where answers are shorter than {least:,} tokens, as "
        cure += f"those that call tools are: then it computes the answer and {unit // 2} tokens "
        yield warning("states", text, f"{cure}again")
    if kv.drops_a_block:
        text = f"drafts drop the last block that is found, so a turn computes {block:,} tokens more"
        cure = '"disable_eagle_block_drop": true in --speculative-config, from vLLM 0.32 on'
        yield warning("drafts", text, cure)


# --- as vLLM makes it -----------------------------------------------------------------------
def token_bytes(kv: Kv) -> float:
    """What one more token takes, over all ranks, in groups that keep all tokens."""
    kept = [block for kind, block, _ in kv.groups if KINDS.get(kind, kind) == KINDS[FULL]]
    return sum(kv.block_bytes / block for block in kept)


def state_blocks(kv: Kv) -> list[int]:
    """Tokens between two states that are kept, of each group of states."""
    return [block for kind, block, _ in kv.groups if KINDS.get(kind, kind) == STATE]


def context_bytes(kv: Kv, num_tokens: int) -> int:
    """What the next turn needs of a context: whole blocks, as a tier keeps them. Of a window or a
    chunk as many as it reaches, of states one."""
    num_blocks = len(state_blocks(kv))
    for kind, block, reach in kv.groups:
        if KINDS.get(kind, kind) != STATE:
            num_blocks += -(-min(num_tokens, reach or num_tokens) // block)
    return kv.block_bytes * num_blocks


def new_bytes(kv: Kv, num_tokens: int) -> float:
    """What a turn of so many tokens adds, and the states after it."""
    grow = [block for kind, block, _ in kv.groups if KINDS.get(kind, kind) != STATE]
    return kv.block_bytes * (sum(num_tokens / block for block in grow) + len(state_blocks(kv)))


def match_unit(block: int) -> int:
    """The largest --prefix-match-unit for blocks of this size: a power of two that divides it."""
    return min(_LARGEST_UNIT, block & -block)


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


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] | None


class _Config(msgspec.Struct):
    """What counts of config.json."""

    num_attention_heads: Count = None
    num_key_value_heads: Count = None
    head_dim: Count = None
    hidden_size: Count = None
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=0, lt=100_000)] | None = None


def read_model_config(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the model's config.json. `model`: a folder, its config.json, or a name on the Hub."""
    found = _find(model, environ)
    try:
        with found.open("rb") as file:
            config = json.loads(file.read(MAX_BYTES))
    except OSError as failure:
        raise BrokenModelError(f"{found} cannot be read ({failure.strerror})") from None
    except (ValueError, RecursionError) as failure:
        raise BrokenModelError(f"{found} is no JSON ({failure})") from None
    if not isinstance(config, dict):
        raise BrokenModelError(f"{found} is no JSON object")
    if (found.parent / MODELOPT).is_file():
        config.setdefault("quantization_config", MODELOPT)  # vLLM reads it as such
    return config


def _find(model: str, environ: Mapping[str, str]) -> Path:
    """The file, in a folder or in the cache of downloads."""
    path = os.path.expanduser(model)
    file = path if path.endswith(".json") else os.path.join(path, "config.json")
    if os.path.isfile(file):
        return Path(file)
    if os.path.isfile(path) or os.path.isfile(os.path.join(path, "params.json")):
        raise NoModelError(f"{model} has no config.json, and other formats are not read here")
    if os.path.exists(path) or model.startswith(("/", ".", "~")):
        raise BrokenModelError(f"there is no config.json in {model}, so no server starts with it")
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
    except OSError as why:
        raise NoModelError(f"{model} cannot be looked up ({why.strerror})") from None
    if not isinstance(found, str):
        raise NoModelError(f"{model} is no folder, and is not downloaded here")
    return Path(found)


def by_config(config: Mapping[str, Any], plan: Plan, vllm: VllmSeen) -> Kv:
    """The KV cache that vLLM would make by config.json. Raises ShapeError, and BrokenModelError
    where no model has such sizes."""
    odd = next((key for key in _OTHER if config.get(key)), "")
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        odd = "sliding_window"
    if (model_type := config.get("model_type")) not in PLAIN or odd:
        what = f"{odd} is set" if odd else f"its model_type is {str(model_type)[:100]}"
        raise ShapeError(f"{what}, so only vLLM knows what its layers keep, and none is here")
    architecture = f"{model_type.title().replace('_', '')}ForCausalLM"  # as Qwen2MoeForCausalLM
    if (named := config.get("architectures")) != [architecture]:
        raise ShapeError(f"its architectures are {str(named)[:100]}, which may keep something else")
    try:
        sizes = msgspec.convert(config, _Config)
    except msgspec.ValidationError as why:
        raise BrokenModelError(f"config.json is broken: {why}") from None
    heads, layers = sizes.num_attention_heads, sizes.num_hidden_layers
    head = sizes.head_dim or (sizes.hidden_size or 0) // (heads or 1)
    if not (heads and layers and head):
        raise ShapeError("num_attention_heads, num_hidden_layers or hidden_size is missing")
    kv_heads = sizes.num_key_value_heads or heads
    # Where there are more ranks than heads, several keep one.
    heads_kept = kv_heads * max(1, plan.tensor_parallel_size // kv_heads)
    num_bytes = 2 * heads_kept * head * _value_bytes(config, plan.kv_cache_dtype)
    aside, seen = "", _server(plan, vllm)
    try:
        group = Group(FULL, BLOCK_SIZE)
        proven.check_groups([group], BLOCK_SIZE, plan.decode_context_parallel_size)
    except ValueError as why:
        aside = proven.why_aside(True, str(why))
    return Kv(
        device="",
        architecture=architecture,
        aside=aside,
        no_tier=proven.why_no_tier(seen),
        no_disk=proven.why_no_disk(seen),
        layers=((FULL, None, layers),),
        groups=((FULL, BLOCK_SIZE, None),),
        block_bytes=BLOCK_SIZE * layers * num_bytes,
        num_ranks=plan.tensor_parallel_size * plan.pipeline_parallel_size,
        prefix_caching=plan.enable_prefix_caching is not False,
        drops_a_block=False,
        server=seen._asdict(),
    )


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
