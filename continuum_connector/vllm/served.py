"""Served: a server as vLLM's config describes it, in the terms in which proven.py judges it.

It also says the one thing that we ask for before the server is built, where a block's bytes lie,
how many ranks share its node's memory, and what to expect of a step on this device, for the prior
in costs.py. What vLLM built is read into KvGroups, and refused if it is not proven. Like compat.py,
this goes by feature; the fields of specs are those of v1/kv_cache_interface.py.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from continuum_connector import memory
from continuum_connector.config import CONNECTOR_NAME, ContinuumConfig
from continuum_connector.costs import (
    TYPICAL,
    UNKNOWN,
    Device,
    Shape,
    cpu,
    device_named,
    prefill_prior,
)
from continuum_connector.scheduler.kv_groups import CHUNKED, FULL, WINDOW, KvGroup, KvGroups
from continuum_connector.vllm import compat
from continuum_connector.vllm.proven import KINDS, Group, Server, check_groups, why_no_tier

logger = logging.getLogger(f"vllm.{__name__}")


def read_groups(vllm_config: Any, kv_cache_config: Any) -> KvGroups:
    """Describe the model's KV groups; ConfigError says which kind is not proven yet."""
    groups = [group(each) for each in kv_cache_config.kv_cache_groups]
    hash_size = _hash_size(vllm_config, kv_cache_config) if groups else 0
    parallel = vllm_config.parallel_config
    check_groups(groups, hash_size, getattr(parallel, "decode_context_parallel_size", 1))
    return KvGroups(
        [
            KvGroup(index, each.block_size, KINDS[each.kind], each.window)
            for index, each in enumerate(groups)
        ],
        hash_size,
        key_of=compat.key_of(),
    )


def bytes_per_block(kv_cache_config: Any) -> int:
    """VRAM bytes of one block on one rank, over all layers."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes = [tensor.size for tensor in tensors]
    # vLLM >= 0.29: placements within one backing allocation; `size` is the whole of it. Before,
    # only packed caches, those that name a stride, are one allocation.
    size = max(sizes) if getattr(tensors[0], "block_stride", 0) else sum(sizes)
    return int(size // kv_cache_config.num_blocks)


def is_alone(vllm_config: Any) -> bool:
    """Whether no other connector may need a turn's blocks after its end."""
    others = getattr(vllm_config, "ec_transfer_config", None)
    return vllm_config.kv_transfer_config.kv_connector == CONNECTOR_NAME and others is None


def features(vllm_config: Any, kv_cache_config: Any) -> tuple[bool, bool]:
    """Whether the user's own priorities rank turns; whether hits need more than blocks of full
    attention, or drafts drop some. Asks nothing that a later vLLM could lack: it is asked first."""
    policy = getattr(getattr(vllm_config, "scheduler_config", None), "policy", "priority")
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    kinds = [type(getattr(group, "kv_cache_spec", None)).__name__ for group in groups]
    drafts = getattr(vllm_config, "speculative_config", None)
    is_full = len(kinds) == 1 and (kinds[0].startswith("Uniform") or KINDS.get(kinds[0]) == FULL)
    return policy == "priority", not is_full or drafts is not None


def _hash_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash. With one group, that is its block size; with several, vLLM keeps it
    since 0.32, and before that the engine works it out as here (v1/engine/core.py)."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return int(groups[0].kv_cache_spec.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    kept = getattr(kv_cache_config, "hash_block_size", None)
    return int(kept or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def group(found: Any) -> Group:
    """Describe one KV group. If its layers differ in bytes (UniformTypeKVCacheSpecs), workers take
    the first, as vLLM does for the scheduler (generate_scheduler_kv_cache_config), because both
    halves must give the same answer."""
    spec = found.kv_cache_spec
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    kind, window = type(spec).__name__, None
    if KINDS.get(kind) == WINDOW:  # plus what vLLM retains beyond it for drafts
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if KINDS.get(kind) == CHUNKED:
        window = spec.attention_chunk_size
    role = getattr(getattr(found, "role", None), "value", "default")
    if role != "default":
        kind += f" in the role {role}"
    return Group(
        kind,
        spec.block_size,
        window,
        mode=getattr(spec, "mamba_cache_mode", "align"),
        is_scratch=not getattr(spec, "prefix_cacheable", True),
    )


OURS = "continuum_connector.vllm.attach"  # where our schedulers are made
BLOCK_OUTERMOST = "BLHNC"
LARGEST_FIXED = 64  # tokens per block for kernels of fixed sizes, as FlashInfer's and FlashMLA's


def server(vllm_config: Any, kv_cache_config: Any = None) -> Server:
    """What decides on a DRAM tier. Before the KV groups are made, it assumes one of full
    attention."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    groups = kv_cache_config and kv_cache_config.kv_cache_groups
    return Server(
        kinds=Server().kinds if groups is None else tuple(group(each).kind for each in groups),
        fails_by_request=compat.can_fail_by_request(),
        kv_cache_dtype=cache.cache_dtype,
        pipeline_parallel=parallel.pipeline_parallel_size,
        executor=str(parallel.distributed_executor_backend),
        has_drafts=vllm_config.speculative_config is not None,
        has_lora=vllm_config.lora_config is not None,
        state_mode=cache.mamba_cache_mode,
        finds_answers=getattr(cache, "prefix_cache_retention_interval", None) != 0,
        leaves_right_states=compat.leaves_right_states(vllm_config),
    )


def wanted_layout(config: ContinuumConfig, vllm_config: Any) -> str | None:
    """The KV cache layout to ask for; None leaves the choice to vLLM.

    Block-outermost makes a block one contiguous run: one copy instead of one per layer. We do not
    ask for it where nothing will be copied, or where it would keep vLLM from splitting blocks.
    """
    if config.kv_layout == "stock" or not compat.has_layouts():
        return None
    if config.kv_layout != "auto":
        return config.kv_layout
    is_wanted = may_have_tier(config, vllm_config) and not splits_blocks(vllm_config)
    return BLOCK_OUTERMOST if is_wanted else None


def splits_blocks(vllm_config: Any) -> bool:
    """Whether attention kernels take the model's blocks in pieces: because the blocks are as large
    as a state's, or, as far as that can be known, because the user asked for large ones.

    Blocks that lie block-outermost are not split (v1/worker/utils.py, prepare_kernel_block_sizes).
    For kernels of fixed sizes, such as FlashInfer's, later releases of vLLM then map every block
    table anew (AttentionGroup.kernel_block_table), and 0.29 ends with a ValueError.
    """
    if vllm_config.model_config.is_hybrid:
        return True
    block_size = vllm_config.cache_config.block_size or 0
    return block_size > LARGEST_FIXED and not compat.maps_kernel_blocks()


def may_have_tier(config: ContinuumConfig, vllm_config: Any) -> bool:
    """Whether something will be copied, as far as that is known before there are KV groups."""
    if config.dram_bytes is None and not memory.may_take(spare(vllm_config)):
        return False
    if config.dram_bytes == 0 or not vllm_config.cache_config.enable_prefix_caching:
        return False
    shares_kv = vllm_config.parallel_config.decode_context_parallel_size > 1
    return not shares_kv and not why_no_tier(server(vllm_config))


def platform() -> str:
    """What vLLM serves on: cuda, rocm, cpu, ...; "" where it found no device."""
    from vllm.platforms import current_platform

    return str(getattr(current_platform, "device_name", ""))


def own_scheduler(vllm_config: Any) -> str:
    """The scheduler that --scheduler-cls names, if it is not ours, or ""."""
    config = vllm_config.scheduler_config
    if config.scheduler_cls is None:
        return ""
    named = type(config).get_scheduler_cls(config)
    is_ours = any(each.__module__ == OURS for each in getattr(named, "__mro__", (named,)))
    return "" if is_ours else str(config.scheduler_cls)


# --- the node it runs on -------------------------------------------------------------------
# How many ranks share the node's memory, even for an engine that was told it is alone, and what the
# node had to spare. vLLM makes the engines of a dense data-parallel model independent of one
# another before it builds their schedulers and workers (v1/engine/core.py, run_engine_core:
# data_parallel_size and data_parallel_size_local become 1,
# ParallelConfig.reconfigure_for_independent_dp_rank from 0.29 on), and does not keep how many there
# are. So the process that starts them counts while the config still describes all of them, and the
# count goes with the config into every engine and worker.

# An attribute of SchedulerConfig that is no field, so not part of its hash. ParallelConfig cannot
# have it: for a draft model vLLM copies that config field by field (config/utils.py, replace), and
# would fail.
_COUNT = "_continuum_node_ranks"
_SPARE = "_continuum_spare"


def keep_count(vllm_config: Any) -> None:
    """Make the config carry the count, while it still describes all engines of this node."""
    setattr(vllm_config.scheduler_config, _COUNT, _count(vllm_config.parallel_config))


def keep_spare(vllm_config: Any, spare: memory.Spare) -> None:
    """Make the config carry what this node has to spare."""
    setattr(vllm_config.scheduler_config, _SPARE, spare)


def spare(vllm_config: Any) -> memory.Spare | None:
    """What the node had to spare when its server started; None if nobody has looked."""
    return getattr(vllm_config.scheduler_config, _SPARE, None)


def rank(vllm_config: Any) -> int:
    """This worker's rank among those of its engine (v1/worker/worker_base.py sets it).

    No default: slots that two ranks report under one number would never count as usable.
    """
    return int(vllm_config.parallel_config.rank)


def num_node_ranks(vllm_config: Any) -> int:
    """The ranks of all engines that one `vllm serve` has on this node, which share its memory.

    If the config itself says more, that counts: engines can be added (elastic expert parallelism),
    and a dense replica that was made independent says less, never more.
    """
    kept = getattr(vllm_config.scheduler_config, _COUNT, 1)
    return max(_count(vllm_config.parallel_config), kept)


def _count(parallel: Any) -> int:
    return memory.node_ranks(
        parallel.world_size,
        parallel.data_parallel_size_local,
        parallel.data_parallel_size,
        parallel.nnodes,
    )


# --- what a step takes on it --------------------------------------------------------------
# vLLM estimates a step's operations and bytes itself (v1/metrics/perf.py), per rank: with experts,
# quantization and parallelism counted.

# Tokens of the steps that we ask about. With contexts above any window, the difference of two is
# full attention alone; a step that reads weights has enough tokens to reach most experts.
NUM_NEW, SHORT, LONG, NUM_READING = 1024, 32_768, 65_536, 64


def prefill(vllm_config: Any) -> tuple[float, float, float]:
    """What a prefill takes on this server, as `prefill_prior` says it. It is only a guess, so
    nothing that vLLM does not know about its model or device stops the server."""
    try:
        prior = prefill_prior(shape(vllm_config), device())
    except Exception:
        logger.debug("ContinuumConnector: no estimate of this model or device", exc_info=True)
        return prefill_prior(TYPICAL, UNKNOWN)
    return prior if all(map(math.isfinite, prior)) else prefill_prior(TYPICAL, UNKNOWN)


def device() -> Device:
    """The device that vLLM serves on. Asks no driver for more than vLLM itself has asked."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return cpu(len(os.sched_getaffinity(0)))
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return device_named(current_platform.get_device_name(), capability and capability.major)


def shape(vllm_config: Any) -> Shape:
    """One rank's share of the model; TYPICAL where vLLM's estimate does not know the model."""
    from vllm.v1.metrics import perf

    def part(kind: Any) -> Any:
        """None: not a part of this model, or not as vLLM's estimate expects one."""
        try:
            return kind.from_vllm_config(vllm_config)
        except (perf.InvalidComponent, AttributeError, LookupError, TypeError, ValueError):
            return None

    parts = [each for each in map(part, perf.ComponentMetrics.registered_metrics()) if each]
    # Of a quantization that the estimate does not know, only the head is left.
    if not any(isinstance(each, perf.FfnMetrics) for each in parts):
        return TYPICAL

    def flops(context: int) -> float:
        step = perf.ExecutionContext.from_single_request(NUM_NEW, context, True)
        return float(sum(part.get_num_flops(step) for part in parts))

    reading = perf.ExecutionContext.from_single_request(NUM_READING, NUM_READING, True)
    pair_flops = (flops(LONG) - flops(SHORT)) / (NUM_NEW * (LONG - SHORT))
    token_flops = flops(SHORT) / NUM_NEW - pair_flops * SHORT
    if token_flops <= 0.0:
        return TYPICAL
    return Shape(token_flops, pair_flops, sum(part.get_read_bytes(reading) for part in parts))
