"""Tables: the blocks that vLLM's turns have, for the shadow of stock vLLM (scheduler/stock.py) and
for the end of a turn.

Only this file touches these names of v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from continuum_connector.scheduler.against_stock import CautiousStock, UnknownStock
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.stock import StockCache


class Tables:
    """The block tables of the turns that have blocks, of the first KV group."""

    def __init__(self, tables: Mapping[str, Sequence[Any]], num_cached: Mapping[str, int]) -> None:
        self._tables, self._num_cached = tables, num_cached

    def num_blocks(self) -> int:
        """The sum of their lengths; a block that two turns have counts twice."""
        return sum(map(len, self._tables.values()))

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def num_cached_of(self, request_id: str) -> int:
        """How many of the turn's blocks have their hash, from the first on."""
        return self._num_cached.get(request_id, 0)


def popper(found: Any, groups: KvGroups) -> Callable[[str], list[Any]] | None:
    """What takes a turn's blocks from vLLM, in order, for the caller to free; None where this vLLM
    must free them itself: a hit needs more than blocks of one kind."""
    pop: Callable[[str], list[Any]] | None = getattr(found, "pop_blocks_for_free", None)
    return pop if groups.are_simple else None


def stock_beside(pool: Any, found: Any, groups: KvGroups) -> UnknownStock:
    """What stock vLLM would have kept in a pool like this one, of the coordinator `found`; unknown
    where a hit needs more than blocks of one kind, or where this vLLM has no such tables."""
    size = next(iter(groups)).block_size
    manager = next(iter(getattr(found, "single_type_managers", ())), None)
    tables = getattr(manager, "req_to_blocks", None)
    num_cached = getattr(manager, "num_cached_block", None)
    if not groups.are_simple or size != groups.hash_size or tables is None or num_cached is None:
        return UnknownStock()
    num_dropped = groups.num_proof_tokens // size
    beside = Tables(tables, num_cached)
    return CautiousStock(StockCache(pool.num_gpu_blocks - 1, size, beside, num_dropped))
