"""Served: a server as vLLM's config describes it, in the terms in which proven.py judges it.

It also says the one thing that we ask for before the server is built: where a block's bytes lie.
"""

from __future__ import annotations

from typing import Any

from continuum_connector.config import ContinuumConfig
from continuum_connector.vllm import compat, kv_specs
from continuum_connector.vllm.proven import Server, why_no_tier

BLOCK_OUTERMOST = "BLHNC"
LARGEST_FIXED = 64  # tokens per block for kernels of fixed sizes, as FlashInfer's and FlashMLA's


def server(vllm_config: Any, kv_cache_config: Any = None) -> Server:
    """What decides on a DRAM tier. Before the KV groups are made, it assumes one of full
    attention."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    return Server(
        kinds=kv_specs.kinds(kv_cache_config) if kv_cache_config else Server().kinds,
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
    if config.dram_bytes == 0 or not vllm_config.cache_config.enable_prefix_caching:
        return False
    shares_kv = vllm_config.parallel_config.decode_context_parallel_size > 1
    return not shares_kv and not why_no_tier(server(vllm_config))
