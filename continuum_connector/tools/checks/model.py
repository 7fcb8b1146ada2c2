"""Lines on the model: its KV groups, and whether the connector supports it.

vLLM says what they are (vllm/planned.py). Where it cannot be asked, config.json is read for what it
proves alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.tools.checks import kv as kvs
from continuum_connector.tools.checks.line import Line, Verdict, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import Kv, Machine, VllmSeen
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.vllm import proven
from continuum_connector.vllm.proven import Group, Server

LOG = "the server's log says `steps aside` if it does not"
AS_STOCK = "none yet: it works, as without the connector"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Will this model's turns be kept, and may they go to DRAM?"""
    kv = None if plan.hides_its_model else vllm.kv
    if kv is None:
        yield _not_built(machine, plan, vllm)
        # What is known without a model: its layers are taken for full attention.
        seen = Server(
            kv_cache_dtype=plan.kv_cache_dtype,
            pipeline_parallel=plan.pipeline_parallel_size,
            executor=plan.distributed_executor_backend,
            has_drafts=plan.drafts,
            has_lora=plan.enable_lora,
            fails_by_request=vllm.fails_by_request or not vllm.version,  # unseen: do not blame it
            leaves_right_states=vllm.mends_drafted_states or not vllm.version,
        )
        yield from _tiers(plan, proven.why_no_tier(seen), proven.why_no_disk(seen))
        return
    text = f"{kv.architecture} is served: {kvs.in_words(kv)}; {size(kvs.token_bytes(kv))} per token"
    if states := kvs.state_blocks(kv):
        num_bytes = size(kv.block_bytes * len(states))
        text += f", {num_bytes} of states per turn, blocks of {max(states):,} tokens"
    served = ok("model", f"{text}, as vLLM makes them on {kv.device}")
    if kv.aside and kv.prefix_caching:  # without it, another line says so
        served = error("model", f"the connector steps aside: {kv.aside}", AS_STOCK)
    yield served
    if kv.aside:
        return
    if states:
        yield from _states(plan, kv, max(states))
    yield from _tiers(plan, kv.no_tier, kv.no_disk)


def _tiers(plan: Plan, no_tier: str, no_disk: str) -> Iterator[Line]:
    """The tiers that are asked for and refused. Without a DRAM tier nothing is said of the disk."""
    if plan.config.dram_bytes != 0 and no_tier:
        cure = "set dram_bytes = 0, or serve without what it names"
        line = error("DRAM tier", no_tier, cure)
        is_asked = plan.config.dram_bytes is not None
        yield line if is_asked else line._replace(verdict=Verdict.WARNING)
    elif plan.config.disk_path and no_disk:
        yield error("disk tier", no_disk, "leave disk_path and disk_bytes out, or what it names")


def _not_built(machine: Machine, plan: Plan, vllm: VllmSeen) -> Line:
    """The line where vLLM makes no KV cache of this model here."""
    if plan.hides_its_model:
        text = "only who runs it knows which; vLLM's own default is not what is meant"
        return unseen("model", text, "paste it with the model's name, or give --model")
    model = plan.model or vllm.model
    try:
        if not model:
            raise kvs.NoModelError("none was named, so its KV groups are not known")
        config = kvs.read_model_config(model, machine.environ)
        if vllm.refused:
            return unseen("model", "not looked at, because vLLM refuses the options", "mend them")
        if vllm.not_seen:
            text = f"this vLLM cannot say here what its layers keep: {vllm.not_seen[:400]}"
            return unseen("model", text, LOG)
        shape = kvs.read_shape(config, plan.kv_cache_dtype)
    except kvs.BrokenModelError as why:
        if plan.is_inside and model.startswith(("/", ".", "~")):
            text = f"{model} is a path in the container, so it is not seen from here"
            return unseen("model", text, "run this inside the container, or give --model")
        cure = "mend it, or name another --model: vLLM reads the same file"
        return error("model", str(why), cure)
    except kvs.NoModelError as why:
        cure = "--model FOLDER with its config.json; nothing is downloaded for a check"
        return unseen("model", str(why), cure)
    except kvs.ShapeError as why:
        text = f"whether it is served cannot be told from config.json alone: {why}"
        return unseen("model", text, LOG)
    if vllm.architectures and shape.architecture not in vllm.architectures:
        text = f"this vLLM has no generating model {shape.architecture[:100]} of its own"
        return unseen("model", text, f"see whether it serves it at all; {LOG}")
    try:
        group = Group(kvs.FULL, kvs.BLOCK_SIZE)
        proven.check_groups([group], kvs.BLOCK_SIZE, plan.decode_context_parallel_size)
    except ValueError as why:
        aside = proven.why_aside(True, str(why))
        return error("model", f"the connector steps aside: {aside}", AS_STOCK)
    token = size(shape.context_bytes(1, plan.tensor_parallel_size))
    text = f"{shape.architecture} is served: {shape.num_layers} layers of full attention; {token} "
    return ok("model", f"{text}per token, by config.json alone")


def _states(plan: Plan, kv: Kv, block: int) -> Iterator[Line]:
    """What to set for a model with states, because its blocks are large: how much of its
    predecessor's context a turn computes again (docs/models.md)."""
    unit = kvs.match_unit(block)
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
