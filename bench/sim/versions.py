"""vLLM's objects as the lab and the tests build them: the only place that asks which version."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import inspect
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.structured_output import StructuredOutputManager

from continuum_connector.scheduler.kv_groups import CHUNKED, FULL, STATE, WINDOW, KvGroup
from continuum_connector.vllm.attach import prepare

MAX_MODEL_LEN = 32_768
TINY_TOKEN_BYTES = 256  # K and V of a token, two heads of 32 in bfloat16
_FIELDS = {field.name for field in dataclasses.fields(KVCacheTensor)}
CAN_FAIL_REQUESTS = "failed_recving" in {f.name for f in dataclasses.fields(KVConnectorOutput)}


def vllm_config(
    *,
    block_size: int,
    enable_prefix_caching: bool = True,
    world_size: int = 1,
    num_stages: int = 1,
    transfer: KVTransferConfig | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    cache: Mapping[str, Any] | None = None,
    has_states: bool = False,
    num_drafts: int = 0,
    **scheduler_config: Any,
) -> VllmConfig:
    """Return what `vllm serve` would build, for a model that is a config.json only.

    `cache`: more of CacheConfig; `num_drafts`: tokens that the MTP layer of a model with states
    guesses, 0 for none. Options that this vLLM does not have are left out.
    """
    options = _known(SchedulerConfig, scheduler_config)
    model = copy.copy(_model_config(max_model_len, has_states))  # vLLM marks it as completed
    parallel = ParallelConfig(
        tensor_parallel_size=world_size // num_stages,
        pipeline_parallel_size=num_stages,
        distributed_executor_backend="mp" if world_size > 1 else "uni",
    )
    made = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            **_known(CacheConfig, cache or {}),
        ),
        parallel_config=parallel,
        speculative_config=_mtp(model, parallel, num_drafts) if num_drafts else None,
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len, is_encoder_decoder=False, **options
        ),
        device_config=DeviceConfig("cpu"),  # 0.26 does not ask the platform
        kv_transfer_config=transfer,
    )
    prepare(made)  # as where `vllm serve` makes its config
    return made


def _known(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)}
    return {key: value for key, value in options.items() if key in names}


_TINY = {  # of any architecture
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
_QWEN3_NEXT = {  # three layers with states, one with full attention
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "head_dim": 32,
    **{f"linear_num_{what}_heads": 2 for what in ("key", "value")},
    **{f"linear_{what}_head_dim": 32 for what in ("key", "value")},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@functools.cache
def _model_config(max_model_len: int, has_states: bool) -> ModelConfig:
    """Describe a tiny model; one per process, for vLLM inspects the model class."""
    folder = Path(tempfile.mkdtemp(prefix="continuum-harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        **_TINY,
        **(_QWEN3_NEXT if has_states else _LLAMA),
        "max_position_embeddings": max_model_len,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len)


def _mtp(model: ModelConfig, parallel: ParallelConfig, num_drafts: int) -> SpeculativeConfig:
    """Speculative decoding by the model's own MTP layer, as a server's config has it."""
    return SpeculativeConfig(
        method="mtp",
        num_speculative_tokens=num_drafts,
        target_model_config=model,
        target_parallel_config=parallel,
    )


def scheduler(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Any, int]:
    """Do what EngineCore.__init__ does once the KV cache size is known; return the scheduler that
    the config chooses, and how many tokens a block hash stands for."""
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    if kv_cache_config.has_mamba_layers:
        config.cache_config.mamba_cache_mode = "align"
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    _complete(kv_cache_config, config.cache_config, hash_block_size)
    built = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    return built, hash_block_size


def _complete(built: KVCacheConfig, config: CacheConfig, hash_block_size: int) -> None:
    """Add what a server's has of the config, where this vLLM has it: without it window groups
    would hash every block (>= 0.29), as on no server."""
    if hasattr(built, "prefix_cache_retention_interval"):
        built.prefix_cache_retention_interval = config.prefix_cache_retention_interval
    if hasattr(built, "hash_block_size"):
        built.hash_block_size = hash_block_size


def kv_cache_config(
    num_blocks: int,
    block_size: int,
    windows: tuple[int | None, ...] = (None,),
    token_bytes: int = TINY_TOKEN_BYTES,
) -> KVCacheConfig:
    """One full-attention group for each None of `windows`, one of windows for each number."""
    kinds = [FULL if window is None else WINDOW for window in windows]
    groups = [
        KvGroup(i, block_size, kind, window)
        for i, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    ]
    return cache_of(num_blocks, groups, token_bytes)


def cache_of(
    num_blocks: int, groups: Sequence[KvGroup], token_bytes: int = TINY_TOKEN_BYTES
) -> KVCacheConfig:
    """Lay out one layer per KV group, all groups on the same bytes, as vLLM does.

    `token_bytes`: K and V of a token over all layers of a group, a multiple of 4.
    """
    heads = {"num_kv_heads": 1, "head_size": token_bytes // 4, "dtype": torch.bfloat16}
    page = max(group.block_size for group in groups) * token_bytes
    specs = [
        KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], _spec(group, heads, page))
        for i, group in enumerate(groups)
    ]
    tensors = _tensors(num_blocks, page, [spec.layer_names[0] for spec in specs])
    return KVCacheConfig(num_blocks, kv_cache_tensors=tensors, kv_cache_groups=specs)


def _spec(group: KvGroup, heads: dict[str, Any], page: int) -> Any:
    """`page`: bytes of a block, which a state's page is padded to."""
    size, span = group.block_size, group.window
    if group.kind == STATE:
        state = {"shapes": ((page // 4,),), "dtypes": (torch.bfloat16,), "page_size_padded": page}
        return MambaSpec(block_size=size, mamba_cache_mode="align", **state)
    if group.kind == WINDOW:
        return SlidingWindowSpec(block_size=size, sliding_window=span, **heads)
    if group.kind == CHUNKED:
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=span, **heads)
    return FullAttentionSpec(block_size=size, **heads)


def hybrid_cache(
    num_blocks: int, block_size: int, token_bytes: int, num_states: int, num_drafts: int
) -> KVCacheConfig:
    """The same of `num_states` groups with states and one of full attention, the last, in which an
    MTP layer lies where there is one: vLLM flags it (kv_cache_utils.py, _annotate_eagle_groups)."""
    states = [KvGroup(index, block_size, STATE) for index in range(num_states)]
    built = cache_of(num_blocks, [*states, KvGroup(num_states, block_size)], token_bytes)
    return with_drafts(built, num_states, num_drafts) if num_drafts else built


def with_drafts(built: KVCacheConfig, index: int, num_drafts: int) -> KVCacheConfig:
    """Have that group hold the KV of a layer that drafts, and states room for one after each."""
    built.kv_cache_groups[index].is_eagle_group = True
    for group in built.kv_cache_groups:
        if isinstance(group.kv_cache_spec, MambaSpec):
            room = {"num_speculative_blocks": num_drafts}
            group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **room)
    return built


def _tensors(num_blocks: int, page: int, names: list[str]) -> list[KVCacheTensor]:
    size = num_blocks * page
    if "shared_by" in _FIELDS:  # 0.26-0.28: a tensor per set of aliasing layers
        return [KVCacheTensor(size=size, shared_by=names)]
    return [  # 0.29+: groups overlay each other at the same offset
        KVCacheTensor(size=size, layers=[name], layer_stride=size, block_stride=page)
        for name in names
    ]


def cached_tokens(output: Any) -> tuple[int, int] | None:
    """Return prompt tokens hit in VRAM and by the connector, from the output that says so."""
    stats = output.prefill_stats
    return stats and (stats.num_local_cached_tokens, stats.num_external_cached_tokens)


@functools.cache
def saves_on_empty_steps() -> bool:
    """Whether workers hear `wait_for_save` in a step without tokens too (vLLM >= 0.31)."""
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    hooks = inspect.signature(KVConnectorModelRunnerMixin._get_kv_connector_output)
    return "wait_for_save" not in hooks.parameters
