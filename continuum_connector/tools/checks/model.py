"""Lines on the model: its KV groups, and whether the connector serves it."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.errors import ConfigError
from continuum_connector.tools.checks.line import Line, error, ok, several, size, unseen
from continuum_connector.tools.checks.machine import Machine, VllmSeen
from continuum_connector.tools.checks.model_file import (
    BrokenModelError,
    NoModelError,
    read_model_config,
)
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.shape import (
    CHUNKED,
    FULL,
    MLA,
    SLIDING,
    Layer,
    Shape,
    ShapeError,
    count_kinds,
    read_shape,
)
from continuum_connector.vllm.proven import Group, check_groups, why_aside, why_no_tier

BLOCK_SIZE = 16  # any: all groups of such a model have the same
_WORDS = {FULL: "full attention", MLA: "latent attention (MLA)", CHUNKED: "chunked attention"}
LOG = "the server's log says `steps aside` if it does not"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    num_groups, kv_cache_dtype = 1, plan.kv_cache_dtype  # where the model is not seen
    try:
        shape = _shape(machine, plan, plan.model or vllm.model)
    except BrokenModelError as why:
        cure = "mend it, or name another --model: vLLM reads the same file"
        yield error("model", str(why), cure)
    except NoModelError as why:
        cure = "--model FOLDER with its config.json; nothing is downloaded for a check"
        yield unseen("model", str(why), cure)
    except ShapeError as why:
        yield unseen("model", f"whether it is served cannot be told from config.json: {why}", LOG)
    else:
        yield _served(plan, shape, vllm)
        num_groups, kv_cache_dtype = len(groups_of(shape)), shape.kv_cache_dtype
    fails = vllm.fails_by_request or not vllm.version  # unseen: do not blame it
    why_not = why_no_tier(plan.pipeline_parallel, num_groups, fails, kv_cache_dtype)
    if plan.config.dram_bytes and why_not:
        yield error("DRAM tier", why_not, "leave dram_bytes at 0, or serve without what it names")


def _shape(machine: Machine, plan: Plan, model: str) -> Shape:
    if not model:
        raise NoModelError("none was named, so its KV groups are not known")
    config = read_model_config(model, machine.environ)
    return read_shape(config, plan.dtype, plan.kv_cache_dtype, plan.hybrid_manager)


def aside(plan: Plan, shape: Shape) -> str:
    """Why the connector would step aside for this model, or ""."""
    try:
        check_groups(groups_of(shape), BLOCK_SIZE, plan.context_parallel)
    except ConfigError as why:
        return why_aside(True, str(why))
    return ""


def groups_of(shape: Shape) -> list[Group]:
    """One group per kind of layer; vLLM may make several of a kind, which changes no answer."""
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
    return ok("model", f"{shape.architecture} is served: {kinds}; {_token(plan, shape)}")


def _token(plan: Plan, shape: Shape) -> str:
    if not shape.value_bytes:
        return f"how many bytes {shape.kv_cache_dtype} takes is not known here"
    return f"{size(len(shape.layers) * shape.token_bytes(plan.tensor_parallel))} per token"


def _layers(layer: Layer, number: int) -> str:
    if layer.kind == SLIDING:
        return f"{several('layer', number)} with a window of {layer.window:,}"
    return f"{several('layer', number)} of {_WORDS.get(layer.kind, layer.kind)}"
