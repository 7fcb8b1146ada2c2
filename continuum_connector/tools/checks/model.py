"""Lines on the model: its KV groups, and whether the connector supports it.

vLLM says what they are (vllm/planned.py). Where it cannot be asked, config.json is read for what it
proves alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.tools.checks import kv as kvs
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import Kv, Machine, VllmSeen
from continuum_connector.tools.checks.model_file import (
    BrokenModelError,
    NoModelError,
    read_model_config,
)
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.shape import BLOCK_SIZE, FULL, ShapeError, read_shape
from continuum_connector.vllm.proven import (
    Group,
    Server,
    check_groups,
    why_aside,
    why_no_disk,
    why_no_tier,
)

LOG = "the server's log says `steps aside` if it does not"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    kv = None if plan.hides_its_model else vllm.kv
    if kv is None:
        yield _not_built(machine, plan, vllm)
        # What is known without a model: its layers are taken for full attention.
        seen = Server(
            kv_cache_dtype=plan.kv_cache_dtype,
            pipeline_parallel=plan.pipeline_parallel,
            executor=plan.executor,
            has_drafts=plan.drafts,
            has_lora=plan.lora,
            fails_by_request=vllm.fails_by_request or not vllm.version,  # unseen: do not blame it
            leaves_right_states=vllm.mends_drafted_states or not vllm.version,
        )
        yield from _tiers(plan, seen.kinds, why_no_tier(seen), why_no_disk(seen))
        return
    yield _served(kv)
    if not kv.aside:
        yield from _states(plan, kv)
        kinds = tuple(kind for kind, _, _ in kv.groups)
        yield from _tiers(plan, kinds, kv.no_tier, kv.no_disk)


def _tiers(plan: Plan, kinds: tuple[str, ...], no_tier: str, no_disk: str) -> Iterator[Line]:
    """The tiers that are asked for and refused. Without a DRAM tier nothing is said of the disk."""
    why, cure = no_tier, "set dram_bytes = 0, or serve without what it names"
    if plan.config.dram_bytes and why:
        yield error("DRAM tier", why, cure)
    elif plan.config.dram_bytes is None and why:
        yield warning("DRAM tier", why, cure)
    elif plan.config.disk_path and no_disk:
        yield error("disk tier", no_disk, "leave disk_path and disk_bytes out, or what it names")


def _not_built(machine: Machine, plan: Plan, vllm: VllmSeen) -> Line:
    """The line where vLLM makes no KV cache of this model here."""
    if plan.hides_its_model:
        text = "only who runs it knows which; vLLM's own default is not what is meant"
        return unseen("model", text, "paste it with the model's name, or give --model")
    try:
        model = plan.model or vllm.model
        if not model:
            raise NoModelError("none was named, so its KV groups are not known")
        config = read_model_config(model, machine.environ)
        if vllm.refused:
            return unseen("model", "not looked at, because vLLM refuses the options", "mend them")
        if vllm.not_seen:
            text = f"this vLLM cannot say here what its layers keep: {vllm.not_seen[:400]}"
            return unseen("model", text, LOG)
        shape = read_shape(config, kv_cache_dtype=plan.kv_cache_dtype)
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
    if vllm.architectures and shape.architecture not in vllm.architectures:
        text = f"this vLLM has no generating model {shape.architecture[:100]} of its own"
        return unseen("model", text, f"see whether it serves it at all; {LOG}")
    try:
        check_groups([Group(FULL, BLOCK_SIZE)], BLOCK_SIZE, plan.context_parallel)
    except ValueError as why:
        text = f"the connector steps aside: {why_aside(True, str(why))}"
        return error("model", text, "none yet: it works, as without the connector")
    token = size(shape.context_bytes(1, plan.tensor_parallel))
    text = f"{shape.architecture} is served: {shape.num_layers} layers of full attention; {token} "
    return ok("model", f"{text}per token, by config.json alone")


def _served(kv: Kv) -> Line:
    if kv.aside and kv.prefix_caching:  # without it, another line says so
        cure = "none yet: it works, as without the connector"
        return error("model", f"the connector steps aside: {kv.aside}", cure)
    text = f"{kv.architecture} is served: {kvs.in_words(kv)}; {size(kvs.token_bytes(kv))} per token"
    if block := kvs.state_block(kv):
        text += f", {size(kvs.state_bytes(kv))} of states per turn, blocks of {block:,} tokens"
    return ok("model", f"{text}, as vLLM makes them on {kv.device}")


def _states(plan: Plan, kv: Kv) -> Iterator[Line]:
    """What to set for a model with states, because its blocks are large."""
    block = kvs.state_block(kv)
    if not block:
        return
    yield _recomputed(plan, kv, block)
    if kv.drops_a_block:
        text = f"drafts drop the last block that is found, so a turn computes {block:,} tokens more"
        cure = '"disable_eagle_block_drop": true in --speculative-config, from vLLM 0.32 on'
        yield warning("drafts", text, cure)


def _recomputed(plan: Plan, kv: Kv, block: int) -> Line:
    """How much of its predecessor's context a turn computes again (docs/models.md)."""
    unit = kvs.match_unit(block)
    text = f"a turn goes on from a block of {block:,} tokens: it computes up to that many again"
    text += f", {block // 2:,} in the mean"
    has_drafts = kv.server.get("has_drafts")
    text += " and, with speculative decoding, the last answer" if has_drafts else ""
    if plan.match_unit:
        return ok(
            "states", f"{text}; or the last answer and {plan.match_unit // 2} tokens, if less"
        )
    least = block // 2 - unit // 2
    cure = f"--prefix-match-unit {unit} where answers are shorter than {least:,} tokens, as those "
    cure += f"that call tools are: then it computes the answer and {unit // 2} tokens again"
    return warning("states", text, cure)
