"""Coordinator: vLLM's own rule for prefix hits, asked at the end of a turn.

With compat.py the only file that touches names which vLLM does not promise, by feature too; they
are of v1/core/kv_cache_coordinator.py and v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any


def find(pool: Any) -> Any:
    """Return the KVCacheCoordinator of `pool`, or None.

    Call it while vLLM binds the pool to the connector: only the scheduler, which does that in its
    constructor, has the coordinator (v1/core/sched/scheduler.py, __init__), and it is not yet in
    our hands, or never will be.
    """
    frame = sys._getframe(1)
    while frame is not None:
        manager = getattr(frame.f_locals.get("self"), "kv_cache_manager", None)
        if getattr(manager, "block_pool", None) is pool:
            return getattr(manager, "coordinator", None)
        frame = frame.f_back  # type: ignore[assignment]
    return None


class HitRule:
    """Which blocks the next turn will hit, as vLLM itself would answer it.

    With `prefix_cache_retention_interval` 0, vLLM's default, window groups keep only the window
    that ends with the prompt (reachable_block_mask), so a turn that goes on from the answer would
    compute the answer again; and once the answer is longer than the window, those blocks have
    left the request and may be gone before it ends. So the running turn keeps the window before
    the last block boundary, and when it ends vLLM hashes it. `is_on`: do so.
    """

    def __init__(self, coordinator: Any, pool: Any) -> None:
        self._coordinator = coordinator
        self._pool = pool
        self.is_on = True
        managers = coordinator.single_type_managers
        self._windows = [each for each in managers if hasattr(each, "sliding_window")]
        self._eagle_groups = [
            group for group, each in enumerate(managers) if getattr(each, "use_eagle", False)
        ]
        if self._windows and self._is_sparse and all(map(_ends_on_blocks, self._windows)):
            coordinator.remove_skipped_blocks = self._sparing(coordinator.remove_skipped_blocks)

    @property
    def _is_sparse(self) -> bool:
        return getattr(self._coordinator, "retention_interval", None) is not None

    def kept(self, request: Any) -> list[list[Any]]:
        """Return per KV group the blocks that the next turn will hit: [i] is that of index i, a
        null one where the hit needs none. They may have left the request, and lie in the free
        queue with their hash. Cost grows with the hit."""
        if self._is_sparse:
            self._hash_last_windows(request)
        hashes, size = request.block_hashes, self._pool.hash_block_size
        found, num_tokens, *_ = self._coordinator.find_longest_cache_hit(hashes, len(hashes) * size)
        blocks = [list(each) for each in found]
        end = num_tokens // size
        for group in self._eagle_groups if end < len(hashes) else ():
            # Drafts' groups drop the last block that is found: without the block behind the hit
            # the next lookup would find a hit shorter by one, for which windows keep nothing.
            proof = self._pool.get_cached_block(hashes[end], [group])
            if proof and len(blocks[group]) == end:
                blocks[group] += proof
        return blocks

    def _sparing(self, remove: Callable[..., None]) -> Callable[..., None]:
        """Wrap KVCacheCoordinator.remove_skipped_blocks: of an answer, windows are cut at block
        boundaries, or the first block of the window before one would be gone when the turn ends.

        It costs a block per window group at most, and no request comes to hold more than vLLM
        reckons with (SlidingWindowSpec.max_admission_blocks_per_request allows for a window that
        begins amid a block), as long as a window is a number of blocks.
        """
        size = self._coordinator.scheduler_block_size

        @functools.wraps(remove)
        def remove_skipped_blocks(
            request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
        ) -> None:
            processed = processed_computed_tokens
            if self.is_on and num_prompt_tokens is not None and processed > num_prompt_tokens:
                processed = processed // size * size
            remove(request_id, processed, num_prompt_tokens)

        return remove_skipped_blocks

    def _hash_last_windows(self, request: Any) -> None:
        """Let vLLM hash the last window of a turn, if all of it is still there."""
        for manager in self._windows:
            # How far vLLM has gone itself, hashing or leaving out: what lies there is computed.
            end = manager.num_cached_block.get(request.request_id, 0)
            start = max(0, end - -(-(manager.sliding_window - 1) // manager.block_size))
            blocks: Sequence[Any] = manager.req_to_blocks.get(request.request_id, ())
            window = blocks[start:end]
            if any(block.is_null for block in window):
                continue
            mask = [block.block_hash is None for block in window]
            if any(mask):
                group = manager.kv_cache_group_id
                size = manager.block_size
                self._pool.cache_full_blocks(request, blocks, start, end, size, group, mask)


def _ends_on_blocks(manager: Any) -> bool:
    return bool(manager.sliding_window % manager.block_size == 0)
