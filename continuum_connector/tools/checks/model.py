"""Lines on the model: its KV groups, and whether the connector supports it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from continuum_connector.errors import ConfigError
from continuum_connector.tools.checks.line import (
    Line,
    error,
    ok,
    several,
    size,
    unseen,
    warning,
)
from continuum_connector.tools.checks.machine import Machine, VllmSeen
from continuum_connector.tools.checks.model_file import (
    BrokenModelError,
    NoModelError,
    read_model_config,
)
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.shape import (
    BLOCK_SIZE,
    CHUNKED,
    MLA,
    SLIDING,
    Layer,
    Shape,
    ShapeError,
    count_kinds,
    read_shape,
)
from continuum_connector.tools.checks.states import FULL, STATE, match_unit
from continuum_connector.vllm.proven import (
    Group,
    Server,
    check_groups,
    has_full_attention_alone,
    why_aside,
    why_no_disk,
    why_no_tier,
    why_no_unattached_tier,
)

_WORDS = {
    FULL: "full attention",
    MLA: "latent attention (MLA)",
    CHUNKED: "chunked attention",
    STATE: "states",
}
_V4 = "deepseek_v4"  # config.json does not list its layers in a form that we can read
_V4_KINDS = ("MLAAttentionSpec", "SlidingWindowMLASpec")
LOG = "the server's log says `steps aside` if it does not"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    kinds, kv_cache_dtype = Server().kinds, plan.kv_cache_dtype  # used if the model is not seen
    try:
        config = _config(machine, plan.model or vllm.model)
        shape = _shape(plan, config)
    except BrokenModelError as why:
        cure = "mend it, or name another --model: vLLM reads the same file"
        yield error("model", str(why), cure)
    except NoModelError as why:
        cure = "--model FOLDER with its config.json; nothing is downloaded for a check"
        yield unseen("model", str(why), cure)
    except ShapeError as why:
        yield unseen("model", f"whether it is served cannot be told from config.json: {why}", LOG)
        if config.get("model_type") == _V4:
            kinds = _V4_KINDS
    else:
        yield _served(plan, shape, vllm)
        yield from _states(plan, shape, vllm)
        kinds, kv_cache_dtype = tuple(g.kind for g in groups_of(shape)), shape.kv_cache_dtype
    yield from _tiers(
        plan,
        Server(
            kinds=kinds,
            fails_by_request=vllm.fails_by_request or not vllm.version,  # unseen: do not blame it
            kv_cache_dtype=kv_cache_dtype,
            pipeline_parallel=plan.pipeline_parallel,
            executor=plan.executor,
            has_drafts=bool(plan.speculative),
            has_lora=plan.lora,
            leaves_right_states=vllm.mends_drafted_states or not vllm.version,
        ),
        vllm.may_starve and plan.scheduling_policy == "priority",
    )


def _tiers(plan: Plan, server: Server, may_starve: bool) -> Iterator[Line]:
    """The tiers that are asked for and refused. Without a DRAM tier nothing is said of the disk."""
    is_full = has_full_attention_alone(server.kinds)
    why_unattached = "" if plan.is_attached else why_no_unattached_tier(is_full, may_starve)
    why = why_no_tier(server)
    cure = "set dram_bytes = 0, or serve without what it names"
    if not why and why_unattached:
        why, _, cure = why_unattached.partition("; ")
    if plan.config.dram_bytes and why:
        yield error("DRAM tier", why, cure)
    elif plan.config.dram_bytes is None and why:
        yield warning("DRAM tier", why, cure)
    elif plan.config.disk_path and (why := why_no_disk(server)):
        yield error("disk tier", why, "leave disk_path and disk_bytes out, or what it names")


def _config(machine: Machine, model: str) -> dict[str, Any]:
    if not model:
        raise NoModelError("none was named, so its KV groups are not known")
    return read_model_config(model, machine.environ)


def _shape(plan: Plan, config: dict[str, Any]) -> Shape:
    return read_shape(config, plan.dtype, plan.kv_cache_dtype, plan.hybrid_manager, plan.ssm_dtype)


def aside(plan: Plan, shape: Shape) -> str:
    """Why the connector would step aside for this model, or ""."""
    try:
        check_groups(groups_of(shape), BLOCK_SIZE, plan.context_parallel)
    except ConfigError as why:
        return why_aside(True, str(why))
    return ""


def groups_of(shape: Shape) -> list[Group]:
    """One group per kind of layer. vLLM may make several per kind, which changes no verdict."""
    return [Group(layer.kind, BLOCK_SIZE, layer.window) for layer, _ in count_kinds(shape)]


def _served(plan: Plan, shape: Shape, vllm: VllmSeen) -> Line:
    if shape.attention_heads % plan.tensor_parallel:
        heads = several("attention head", shape.attention_heads)
        text = f"{heads} cannot be split over {plan.tensor_parallel} ranks, so vLLM stops at start"
        return error("model", text, "a --tensor-parallel-size that divides them")
    if why := aside(plan, shape):
        cure = "none yet: it works, as without the connector"
        return error("model", f"the connector steps aside: {why}", cure)
    if vllm.architectures and shape.architecture not in vllm.architectures:
        text = f"this vLLM has no generating model {shape.architecture[:100]} of its own"
        return unseen("model", text, f"see whether it serves it at all; {LOG}")
    kinds = ", ".join(_layers(layer, number) for layer, number in count_kinds(shape))
    text = f"{shape.architecture} is served: {kinds}; {_token(plan, shape)}"
    if not shape.model_type:
        text += "; config.json has no model_type, by which the server knows how to read it"
        return warning("model", text, "put model_type into config.json, as the model's own has it")
    return ok("model", text)


def _token(plan: Plan, shape: Shape) -> str:
    if not shape.value_bytes:
        return f"how many bytes {shape.kv_cache_dtype} takes is not known here"
    num_layers, token = (
        len(shape.layers) - shape.num_states,
        shape.token_bytes(plan.tensor_parallel),
    )
    text = f"{size(num_layers * token)} per token"
    if block := shape.num_states and shape.block_size(plan.tensor_parallel):
        text += f", {size(shape.num_states * block * token)} of states per turn"
        text += f", blocks of {block:,} tokens"
    return text


def _states(plan: Plan, shape: Shape, vllm: VllmSeen) -> Iterator[Line]:
    """What to set for a model with states, because its blocks are large."""
    if not shape.num_states:
        return
    if plan.prefix_caching is None and vllm.version and not vllm.has_layouts:  # before 0.29
        text, _, cure = why_aside(False, "").rpartition("; ")
        why = f"the connector steps aside: {text} (vLLM before 0.29 leaves it off for states)"
        yield error("states", why, cure)
        return
    block = shape.block_size(plan.tensor_parallel)
    if not block:
        text = "how large this model's states are, and so its blocks, is not known here"
        yield unseen("states", text, "the server's log says `Setting attention block size`")
        return
    yield _recomputed(plan, block)
    if drops_a_block(plan.speculative):
        text = f"drafts drop the last block that is found, so a turn computes {block:,} tokens more"
        cure = '"disable_eagle_block_drop": true in --speculative-config, from vLLM 0.32 on'
        yield warning("drafts", text, cure)


def _recomputed(plan: Plan, block: int) -> Line:
    """How much of its predecessor's context a turn computes again (docs/models.md)."""
    unit = match_unit(block)
    text = f"a turn goes on from a block of {block:,} tokens: it computes up to that many again"
    text += f", {block // 2:,} in the mean"
    text += " and, with speculative decoding, the last answer" if plan.speculative else ""
    if plan.match_unit:
        return ok(
            "states", f"{text}; or the last answer and {plan.match_unit // 2} tokens, if less"
        )
    least = block // 2 - unit // 2
    cure = f"--prefix-match-unit {unit} where answers are shorter than {least:,} tokens, as those "
    cure += f"that call tools are: then it computes the answer and {unit // 2} tokens again"
    return warning("states", text, cure)


def drops_a_block(speculative: str) -> bool:
    """Whether these drafts have KV of their own, of which vLLM drops the last block at a hit
    (config/speculative.py, use_eagle_block_drop)."""
    try:
        config = json.loads(speculative or "{}")
    except ValueError:
        return False  # vLLM's own parser reports it
    if not isinstance(config, dict) or config.get("disable_eagle_block_drop"):
        return False
    method = str(config.get("method", ""))
    return any(each in method for each in ("eagle", "mtp"))


def _layers(layer: Layer, number: int) -> str:
    if layer.kind == SLIDING:
        return f"{several('layer', number)} with a window of {layer.window:,}"
    return f"{several('layer', number)} of {_WORDS.get(layer.kind, layer.kind)}"
