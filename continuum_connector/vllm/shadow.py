"""Shadow: vLLM's own rule for prefix hits, asked of blocks that lie elsewhere than in VRAM.

It is a copy of the coordinator whose pool answers for these blocks. So a load can bring what vLLM
would hit if all of it were in VRAM, with full attention, windows, chunks, states, and drafts that
drop a block. Only this file and coordinator.py touch these names of
v1/core/kv_cache_coordinator.py and v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from continuum_connector.scheduler.kv_groups import Key, block_key


class Shadow:
    """Says what a load can bring (kv_groups.py, Lookup)."""

    def __init__(self, coordinator: Any, pool: Any) -> None:
        self._pool = _Elsewhere(pool, len(coordinator.single_type_managers))
        self._coordinator = copy.copy(coordinator)
        self._managers = tuple(map(copy.copy, coordinator.single_type_managers))
        self._coordinator.single_type_managers = self._managers
        for each in (self._coordinator, *self._managers):  # vLLM >= 0.32 asks the managers' pool
            each.block_pool = self._pool

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, limit: int, has: Callable[[Key], bool]
    ) -> int:
        """Return the end of the longest hit up to `limit` tokens, of which the first `start` are
        hit in VRAM and the load `has` the rest; `start` if there is none. O(blocks of the hit).

        What a longer hit needs before `start`, the hit that ends there needs, too, so vLLM has it.
        """
        pool = self._pool
        pool.in_vram, pool.has = frozenset(hashes[: start // pool.hash_block_size]), has
        _, hit, *_ = self._coordinator.find_longest_cache_hit(hashes, limit)
        pool.in_vram, pool.has = frozenset(), _has_nothing
        return max(start, int(hit))

    def first_read(self, group: int, hit: int) -> int:
        """The first token before `hit` for which vLLM gives a load blocks of the group
        (allocate_external_computed_blocks). From there on, all blocks must be loaded."""
        return max(0, int(self._managers[group].get_num_skipped_tokens(hit)))


class _Elsewhere:
    """The part of a BlockPool that the lookup reads. It returns null blocks, because all that
    matters is whether a block is there."""

    def __init__(self, pool: Any, num_groups: int) -> None:
        self.null_block, self.hash_block_size = pool.null_block, pool.hash_block_size
        self.in_vram: frozenset[bytes] = frozenset()
        self.has: Callable[[Key], bool] = _has_nothing
        self._suffixes = [block_key(b"", group) for group in range(num_groups)]

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        if block_hash not in self.in_vram:
            for group in kv_cache_group_ids:
                if not self.has(block_hash + self._suffixes[group]):
                    return None
        return [self.null_block] * len(kv_cache_group_ids)


def _has_nothing(_: Key) -> bool:
    return False
