"""Hold: blocks kept alive by us, released exactly once. Only this file touches BlockPool refs.

A hold is one reference more on each block. While it lives, the pool cannot hand the block
to anybody else; a prefix hit by a request just adds its own reference (law 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from continuum_connector.errors import InvariantError


class Block(Protocol):
    """The part of vLLM's KVCacheBlock we read."""

    block_id: int
    ref_cnt: int
    block_hash: Any


class BlockPool(Protocol):
    """The part of vLLM's BlockPool we use (v1/core/block_pool.py)."""

    blocks: list[Any]
    num_gpu_blocks: int

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def get_num_free_blocks(self) -> int: ...
    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...


class Hold:
    """Blocks somebody of ours still needs. `blocks` is in chain order, head first."""

    __slots__ = ("blocks", "ids", "released")

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = tuple(blocks)
        self.ids = np.array([block.block_id for block in self.blocks], dtype=np.int64)
        self.released = False

    def __len__(self) -> int:
        return len(self.blocks)


class HoldTable:
    """Counts our references per block, so that held + free == total can be proved."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._refs = np.zeros(pool.num_gpu_blocks, dtype=np.int32)
        self.num_holds = 0
        self.num_blocks = 0  # distinct blocks with at least one of our references

    def take(self, blocks: Sequence[Any]) -> Hold:
        """Keep `blocks` alive until `release`. Cost grows with their number."""
        hold = Hold(blocks)
        self._touch(hold)
        self.num_holds += 1
        return hold

    def take_ids(self, block_ids: Iterable[int]) -> Hold:
        """The same, of blocks by their numbers."""
        return self.take([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, hold: Hold) -> None:
        """Drop the hold; blocks nobody else needs become free, tail first to be evicted."""
        if hold.released:
            raise InvariantError(f"hold of {len(hold)} blocks released twice")
        hold.released = True
        self.num_holds -= 1
        self._untouch(hold)

    def try_without(self, hold: Hold) -> None:
        """Let go of the blocks for a trial; `restore` or `settle_trial` must follow at once.

        The pool may be asked whether an allocation fits meanwhile, but if it hands out
        blocks the trial has succeeded and the hold is gone for good.
        """
        self._untouch(hold)

    def restore(self, hold: Hold) -> None:
        """The trial failed and allocated nothing, so every block is still there: keep it."""
        self._touch(hold)

    def settle_trial(self, hold: Hold) -> None:
        """The trial succeeded: the hold is released."""
        if hold.released:
            raise InvariantError(f"hold of {len(hold)} blocks released twice")
        hold.released = True
        self.num_holds -= 1

    def _touch(self, hold: Hold) -> None:
        self._pool.touch(hold.blocks)
        refs = self._refs[hold.ids] + 1  # ids of one hold are distinct
        self._refs[hold.ids] = refs
        self.num_blocks += int(np.count_nonzero(refs == 1))

    def _untouch(self, hold: Hold) -> None:
        refs = self._refs[hold.ids] - 1
        self._refs[hold.ids] = refs
        self.num_blocks -= int(np.count_nonzero(refs == 0))
        # Tail first: it hashes most tokens, so it is the least likely to be hit again.
        self._pool.free_blocks(reversed(hold.blocks))

    def check(self) -> None:
        """Prove that the pool knows of every reference of ours; O(blocks), for tests."""
        if (self._refs < 0).any():
            raise InvariantError(f"negative references on blocks {np.where(self._refs < 0)[0]}")
        for block_id in np.nonzero(self._refs)[0]:
            block = self._pool.blocks[block_id]
            if block.ref_cnt < self._refs[block_id]:
                ours = self._refs[block_id]
                raise InvariantError(
                    f"block {block_id} has {block.ref_cnt} references, {ours} are ours"
                )
        if self.num_blocks != np.count_nonzero(self._refs):
            raise InvariantError(
                f"{self.num_blocks} blocks counted as held, {np.count_nonzero(self._refs)} are"
            )
