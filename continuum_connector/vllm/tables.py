"""Tables: how many blocks vLLM's turns have, for the shadow of stock vLLM (scheduler/stock.py).

Only this file touches these names of v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.stock import StockCache, UnknownStock
from continuum_connector.vllm import coordinator


class Tables:
    """The block tables of the turns that have blocks, of the first KV group."""

    def __init__(self, found: Any) -> None:
        manager = found.single_type_managers[0]
        self._tables: Mapping[str, Sequence[Any]] = manager.req_to_blocks
        self._num_cached: Mapping[str, int] = manager.num_cached_block

    def num_blocks(self) -> int:
        """The sum of their lengths; a block that two turns have counts twice."""
        return sum(map(len, self._tables.values()))

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def num_cached_of(self, request_id: str) -> int:
        """How many of the turn's blocks have their hash, from the first on."""
        return self._num_cached.get(request_id, 0)


def stock_beside(pool: Any, groups: KvGroups) -> UnknownStock:
    """What stock vLLM would have kept in a pool like this one; unknown where a hit needs more than
    blocks of one kind. Call it while vLLM binds the pool (coordinator.find)."""
    found, size = coordinator.find(pool), next(iter(groups)).block_size
    if found is None or not groups.are_simple or size != groups.hash_size:
        return UnknownStock()
    num_dropped = groups.num_proof_tokens // size
    return StockCache(pool.num_gpu_blocks - 1, size, Tables(found), num_dropped)
