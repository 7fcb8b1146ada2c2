"""Host slots: how many a rank has for blocks in DRAM, how large they are, and the line about it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from continuum_connector import memory
from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import ConfigError
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.sizes import size
from continuum_connector.vllm import node, proven, served
from continuum_connector.worker.layout import padded
from continuum_connector.worker.tier import num_slots_for

logger = logging.getLogger(f"vllm.{__name__}")

NO_LOOKUP = (
    "no DRAM tier for hybrid KV groups on this vLLM, which cannot be asked what a load could "
    "bring; vLLM 0.33 can be"
)


def with_default_dram(
    config: ContinuumConfig, vllm_config: Any, kv_cache_config: Any
) -> ContinuumConfig:
    """The config with the size of a DRAM tier that nobody gave one. Every half and engine of a node
    gets the same. While vLLM sleeps, the tier gives its memory back, because a copy of the weights
    needs some (device_allocator/cumem.py)."""
    if config.dram_bytes is not None:
        return config
    kv_bytes = served.bytes_per_block(kv_cache_config) * kv_cache_config.num_blocks
    node_ranks = node.num_node_ranks(vllm_config)
    platform = served.platform()
    if why := proven.why_no_tier(served.server(vllm_config, kv_cache_config)):
        taken = memory.Taken(0, why)
    elif platform not in ("cuda", "cpu"):
        taken = memory.Taken(0, f"the copy engine does not know the platform `{platform}`")
    else:
        spare = node.spare(vllm_config)
        taken = memory.take(spare, kv_bytes * node_ranks, on_cpu=platform == "cpu")
    if not num_slots_for(taken.num_bytes, node_ranks, slot_bytes(config, kv_cache_config)):
        taken = taken._replace(num_bytes=0)
    # Chains of windows and states are stored whole or not at all. One that finds no room is never
    # ordered, so the pool would not hear that more is wanted.
    if taken.num_bytes and not served.read_groups(vllm_config, kv_cache_config).are_simple:
        taken = taken._replace(num_left=0)
    sleeps = vllm_config.model_config.enable_sleep_mode
    sleep_dram = "release" if sleeps else config.sleep_dram
    return msgspec.structs.replace(config, dram=taken, sleep_dram=sleep_dram)


def slot_bytes(config: ContinuumConfig, kv_cache_config: Any) -> int:
    """The size of one rank's host slots, as the worker half lays them out (Layout.padded)."""
    num_bytes = served.bytes_per_block(kv_cache_config)
    return padded(num_bytes) if config.disk_path else num_bytes


def num_slots(
    config: ContinuumConfig,
    seen: proven.Server,
    groups: KvGroups,
    node_ranks: int,
    num_bytes: int,
) -> int:
    """The number of one rank's host slots; 0 without a tier, and the log says why."""
    if config.tier_bytes == 0:
        why = config.dram.why if config.dram else "dram_bytes = 0"
        logger.info("ContinuumConnector: no DRAM tier (%s); %s", why, memory.SETS)
        return 0
    why = proven.why_no_tier(seen)
    if not why and not groups.are_simple and groups.lookup is None:
        why = NO_LOOKUP
    if why:
        is_asked = config.dram_bytes is not None
        logger.log(logging.WARNING if is_asked else logging.INFO, "ContinuumConnector: %s", why)
        return 0
    number = num_slots_for(config.tier_bytes, node_ranks, num_bytes)
    if number == 0:
        raise ConfigError(
            f"dram_bytes = {config.tier_bytes} over {node_ranks} ranks holds no block "
            f"({num_bytes} bytes each), so nothing could be offloaded; "
            f"set {num_bytes * node_ranks} or more, or 0"
        )
    told = size(config.tier_bytes)
    if config.dram:
        told = f"up to {told}, by default {config.dram.why}; {memory.SETS}"
    logger.info(
        "ContinuumConnector: DRAM tier of %d blocks of %d KiB on each of %d ranks, %s",
        number,
        num_bytes // 1024,
        node_ranks,
        told,
    )
    return number
