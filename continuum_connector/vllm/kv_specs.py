"""KvSpecs: reads KvGroups from the KV groups that vLLM built, and refuses what is not proven.

Like compat.py, it goes by feature; the fields of specs are those of v1/kv_cache_interface.py.
"""

from __future__ import annotations

from typing import Any

from continuum_connector.scheduler.kv_groups import CHUNKED, WINDOW, KvGroup, KvGroups
from continuum_connector.vllm.proven import KINDS, Group, check_groups


def read_groups(vllm_config: Any, kv_cache_config: Any) -> KvGroups:
    """Describe the model's KV groups; ConfigError says which kind is not proven yet."""
    groups = [_group(group) for group in kv_cache_config.kv_cache_groups]
    hash_size = _hash_size(vllm_config, kv_cache_config) if groups else 0
    parallel = vllm_config.parallel_config
    check_groups(groups, hash_size, getattr(parallel, "decode_context_parallel_size", 1))
    return KvGroups(
        [
            KvGroup(index, group.block_size, KINDS[group.kind], group.window)
            for index, group in enumerate(groups)
        ],
        hash_size,
    )


def bytes_per_block(kv_cache_config: Any) -> int:
    """VRAM bytes of one block on one rank, over all layers."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes = [tensor.size for tensor in tensors]
    # vLLM >= 0.29: placements within one backing allocation; `size` is the whole of it. Before,
    # only packed caches, those that name a stride, are one allocation.
    size = max(sizes) if getattr(tensors[0], "block_stride", 0) else sum(sizes)
    return int(size // kv_cache_config.num_blocks)


def kinds(kv_cache_config: Any) -> tuple[str, ...]:
    """The class of each KV group's spec, as proven.Group has it."""
    return tuple(_group(group).kind for group in kv_cache_config.kv_cache_groups)


def _hash_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash. With one group, that is its block size; with several, vLLM keeps it
    since 0.32, and before that the engine works it out as here (v1/engine/core.py)."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return int(groups[0].kv_cache_spec.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    kept = getattr(kv_cache_config, "hash_block_size", None)
    return int(kept or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def _group(group: Any) -> Group:
    """Describe one KV group. If its layers differ in bytes (UniformTypeKVCacheSpecs), workers take
    the first, as vLLM does for the scheduler (generate_scheduler_kv_cache_config), because both
    halves must give the same answer."""
    spec = group.kv_cache_spec
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    kind, window = type(spec).__name__, None
    if KINDS.get(kind) == WINDOW:  # plus what vLLM retains beyond it for drafts
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if KINDS.get(kind) == CHUNKED:
        window = spec.attention_chunk_size
    role = getattr(getattr(group, "role", None), "value", "default")
    if role != "default":
        kind += f" in the role {role}"
    return Group(
        kind,
        spec.block_size,
        window,
        mode=getattr(spec, "mamba_cache_mode", "align"),
        is_scratch=not getattr(spec, "prefix_cacheable", True),
    )
