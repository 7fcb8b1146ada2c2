"""Lines on the model: its KV groups, and whether the connector serves it."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.checks.line import Line, error, ok, unseen
from continuum_connector.checks.machine import Machine
from continuum_connector.checks.model_file import NoModelError, read_model_config
from continuum_connector.checks.plan import Plan
from continuum_connector.checks.seen import VllmSeen
from continuum_connector.checks.shape import (
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
from continuum_connector.checks.words import several, size
from continuum_connector.errors import ConfigError
from continuum_connector.proven import Group, check_groups, why_aside, why_no_tier

KNOWN = {FULL, SLIDING, MLA}  # what compat.kv_groups takes
BLOCK_SIZE = 16  # any: all groups of such a model have the same
_WORDS = {FULL: "full attention", MLA: "latent attention (MLA)", CHUNKED: "chunked attention"}
LOG = "the server's log says `steps aside` if it does not"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    if not plan.model:
        cure = "--model FOLDER, or a model that is downloaded here"
        yield unseen("model", "none was named, so its KV groups are not known", cure)
        return
    try:
        config = read_model_config(plan.model, machine.environ)
        shape = read_shape(config, plan.dtype, plan.kv_cache_dtype, plan.hybrid_manager)
    except NoModelError as why:
        cure = "--model FOLDER with its config.json; nothing is downloaded for a check"
        yield unseen("model", str(why), cure)
        return
    except ShapeError as why:
        yield unseen("model", f"whether it is served cannot be told from config.json: {why}", LOG)
        return
    yield _served(plan, shape)
    groups = groups_of(shape)
    fails = vllm.fails_by_request or not vllm.version  # unseen: do not blame it
    why_not = why_no_tier(plan.pipeline_parallel, len(groups), fails)
    if plan.config.dram_bytes and why_not:
        yield error("DRAM tier", why_not, "leave dram_bytes at 0, or serve without what it names")


def aside(plan: Plan, shape: Shape) -> str:
    """Why the connector would step aside for this model, or ""."""
    try:
        check_groups(groups_of(shape), BLOCK_SIZE, plan.context_parallel)
    except ConfigError as why:
        return why_aside(True, str(why))
    return ""


def groups_of(shape: Shape) -> list[Group]:
    """One group per kind of layer; vLLM may make several of a kind, which changes no answer."""
    return [
        Group(layer.kind, BLOCK_SIZE, layer.window, layer.kind in KNOWN)
        for layer, _ in count_kinds(shape)
    ]


def _served(plan: Plan, shape: Shape) -> Line:
    if why := aside(plan, shape):
        cure = "none yet: it works, as without the connector"
        return error("model", f"the connector steps aside: {why}", cure)
    kinds = ", ".join(_layers(layer, number) for layer, number in count_kinds(shape))
    token = size(len(shape.layers) * shape.token_bytes(plan.tensor_parallel))
    return ok("model", f"{shape.architecture} is served: {kinds}; {token} per token")


def _layers(layer: Layer, number: int) -> str:
    if layer.kind == SLIDING:
        return f"{several('layer', number)} with a window of {layer.window:,}"
    return f"{several('layer', number)} of {_WORDS.get(layer.kind, layer.kind)}"
