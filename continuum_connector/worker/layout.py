"""vLLM's KV tensors -> the regions that hold a block's bytes, proven from the strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from continuum_connector.worker.engine import Region


@dataclass(frozen=True)
class Layout:
    """Where the bytes of every VRAM block lie, for one rank."""

    regions: tuple[Region, ...]
    num_blocks: int
    slot_bytes: int
    device: str
    device_index: int


def read_layout(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> Layout:
    """Derive the regions; raises TransferError with one sentence if they are not proven."""
    raise NotImplementedError
