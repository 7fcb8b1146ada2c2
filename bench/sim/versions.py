"""vLLM's objects as the lab and the tests build them: the only place that asks which version."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import json
import shutil
import tempfile
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
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.structured_output import StructuredOutputManager

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
    transfer: KVTransferConfig | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    **scheduler_config: Any,
) -> VllmConfig:
    """Return what `vllm serve` would build, for a model that is a config.json only.

    Scheduler options that this vLLM does not have are left out.
    """
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    options = {key: value for key, value in scheduler_config.items() if key in known}
    made = VllmConfig(
        model_config=_model_config(max_model_len),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=enable_prefix_caching
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=world_size,
            distributed_executor_backend="mp" if world_size > 1 else "uni",
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len, is_encoder_decoder=False, **options
        ),
        device_config=DeviceConfig("cpu"),  # 0.26 does not ask the platform
        kv_transfer_config=transfer,
    )
    prepare(made)  # as where `vllm serve` makes its config
    return made


@functools.cache
def _model_config(max_model_len: int) -> ModelConfig:
    """Describe a two-layer Llama; one per process, for vLLM inspects the model class."""
    folder = Path(tempfile.mkdtemp(prefix="continuum-harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len)


def scheduler(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Any, int]:
    """Do what EngineCore.__init__ does once the KV cache size is known; return the scheduler that
    the config chooses, and how many tokens a block hash stands for."""
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
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
    """Lay out one layer per KV group, all groups on the same bytes, as vLLM does.

    `token_bytes`: K and V of a token over all layers of a group, a multiple of 4.
    """
    heads = {"num_kv_heads": 1, "head_size": token_bytes // 4, "dtype": torch.bfloat16}
    groups = []
    for i, window in enumerate(windows):
        spec: Any = (
            FullAttentionSpec(block_size=block_size, **heads)
            if window is None
            else SlidingWindowSpec(block_size=block_size, sliding_window=window, **heads)
        )
        groups.append(KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], spec))
    page = groups[0].kv_cache_spec.page_size_bytes
    names = [group.layer_names[0] for group in groups]
    tensors = _tensors(num_blocks, page, names)
    return KVCacheConfig(num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


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
