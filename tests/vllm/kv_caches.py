"""KV caches as vLLM's own code groups, places and allocates them, in the terms of each version."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM uses what is deprecated as it is imported
    try:
        from vllm.v1.core.kv_cache_planning import (  # vLLM >= 0.33
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
        )
    except ImportError:
        from vllm.v1.core.kv_cache_utils import (
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
        )
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout  # vLLM >= 0.29
        from vllm.v1.worker.utils import allocate_kv_cache

        LAYOUTS = tuple(member.name for member in KVCacheLayout)
    except ImportError:
        LAYOUTS = ()

NUM_BLOCKS = 7


def describe(
    vllm_config: Any,
    specs: dict[str, Any] | None = None,
    num_blocks: int = NUM_BLOCKS,
    groups: list[KVCacheGroupSpec] | None = None,
) -> Any:
    """Return the KVCacheConfig of a model with these layers; on 0.29 and later the layout that
    `vllm_config` has by then says where they lie."""
    vllm_config.cache_config.num_gpu_blocks_override = num_blocks
    groups = groups or get_kv_cache_groups(vllm_config, specs)
    return get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)


def build(
    vllm_config: Any,
    layout: str,
    specs: dict[str, Any] | None = None,
    kernel_block_size: int | None = None,
    num_blocks: int = NUM_BLOCKS,
    groups: list[KVCacheGroupSpec] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Make the KV tensors of a model (vLLM >= 0.29)."""
    vllm_config.cache_config.kv_cache_layout = layout
    config = describe(vllm_config, specs, num_blocks, groups)
    sizes = [kernel_block_size] * len(config.kv_cache_groups) if kernel_block_size else None
    return allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], sizes), config


def indexer_spec(block_size: int) -> Any:
    """Return what the indexer of DeepSeek's sparse attention asks for beside MLA: 128 keys in
    FP8 and their scale."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    cache_config = SimpleNamespace(block_size=block_size, cache_dtype="auto")
    layer = SimpleNamespace(cache_config=cache_config, head_dim=128 + 4, dtype=torch.uint8)
    return DeepseekV32IndexerCache.get_kv_cache_spec(layer, None)


def build_old(
    vllm_config: Any,
    runner: str,
    order: str,
    layers: dict[str, tuple[Any, Any]],
    kernel_block_size: int,
    dtype: str = "auto",
    num_blocks: int = NUM_BLOCKS,
) -> tuple[dict[str, Any], Any]:
    """Make the KV tensors of layers with (backend, spec), as vLLM <= 0.28 does.

    `runner`: "one", v1/worker/gpu_model_runner.py, or "two", v1/worker/gpu; `order`: NHD or HND;
    `dtype`: --kv-cache-dtype.
    """
    from vllm.v1.attention.backends import utils as attention
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    config = describe(vllm_config, {name: spec for name, (_, spec) in layers.items()}, num_blocks)
    groups = [AttentionGroup(backend, [name], spec, 0) for name, (backend, spec) in layers.items()]
    sizes = [kernel_block_size]
    attention.set_kv_cache_layout(order)
    try:
        if runner == "two":
            raw = attn_utils._allocate_kv_cache(config, {}, torch.device("cpu"))
            return attn_utils._reshape_kv_cache(groups, raw, dtype, sizes, {}, config), config
        one = GPUModelRunner.__new__(GPUModelRunner)
        one.kv_cache_config, one.device = config, torch.device("cpu")
        one.attn_groups, one.runner_only_attn_layers = [groups], set()
        one.cache_config = SimpleNamespace(cache_dtype=dtype)
        raw = one._allocate_kv_cache_tensors(config)
        return one._reshape_kv_cache_tensors(raw, sizes), config
    finally:
        attention.set_kv_cache_layout(None)
