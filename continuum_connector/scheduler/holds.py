"""Hold: blocks kept alive by us, released exactly once. Only this file touches BlockPool refs.

While a hold lives, the pool cannot hand its blocks to any request; a prefix hit by a request just
adds its own reference (law 2). A pin and a copy may both hold a block, but the pool sees a single
reference for all our holds, because calling the pool would double the time to take a hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from continuum_connector.errors import InvariantError
from continuum_connector.messages import BlockIds


class BlockPool(Protocol):
    """The part of vLLM's BlockPool we use (v1/core/block_pool.py)."""

    blocks: list[Any]
    num_gpu_blocks: int

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def get_num_free_blocks(self) -> int: ...
    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...


def num_usable(pool: BlockPool) -> int:
    """How many blocks requests can have: all but the null block, which holds nothing."""
    return pool.num_gpu_blocks - 1


@dataclass(eq=False, slots=True)
class Hold:
    """Blocks that a pin or a copy of ours still needs. `blocks` is in chain order, head first;
    `ids` are their numbers."""

    blocks: tuple[Any, ...]
    ids: BlockIds
    released: bool = False

    def __len__(self) -> int:
        return len(self.blocks)


class HoldTable:
    """Counts our references per block, so that held + free == total can be proved. `beside`:
    another table of the same pool, if there is one."""

    def __init__(self, pool: BlockPool, beside: HoldTable | None = None) -> None:
        self._pool = pool
        self._refs = np.zeros(pool.num_gpu_blocks, dtype=np.int32)
        # References of all tables together; the pool sees only the first one on a block.
        self._all_refs: Any = np.zeros_like(self._refs) if beside is None else beside._all_refs
        self.num_holds = 0
        self.num_blocks = 0  # distinct blocks with at least one of our references

    def take(self, blocks: Sequence[Any], ids: BlockIds) -> Hold:
        """Keep `blocks`, whose numbers are `ids`, alive until `release`. Cost grows with the
        number of blocks."""
        hold = Hold(tuple(blocks), ids)
        self._touch(hold)
        self.num_holds += 1
        return hold

    def adopt(self, blocks: Sequence[Any], ids: BlockIds) -> Hold:
        """Make a request's own references to its `blocks`, whose numbers are `ids`, a hold: the
        pool counts each once, as one of ours."""
        hold = Hold(tuple(blocks), ids)
        if len(self._first(hold)) < len(hold):  # others count twice now, as the request's and ours
            others = (self._all_refs[hold.ids] > 1).nonzero()[0]
            self._pool.free_blocks(reversed(_those(hold.blocks, others)))
        self.num_holds += 1
        return hold

    def release(self, hold: Hold) -> None:
        """Drop the hold; blocks without another reference become free, and are evicted tail
        first."""
        self.settle_trial(hold)
        self._untouch(hold)

    def try_without(self, hold: Hold) -> None:
        """Let go of the blocks for a trial; `restore` or `settle_trial` must follow at once.

        Meanwhile the pool may be asked whether an allocation fits. If it hands out blocks, the
        trial has succeeded, and the hold is gone for good.
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
        self._pool.touch(_those(hold.blocks, self._first(hold)))

    def _first(self, hold: Hold) -> Any:
        """Count a reference to each of its blocks; return the places of those that had none of
        ours before."""
        self.num_blocks += len(_become(self._refs, hold.ids, 1, 1))
        return _become(self._all_refs, hold.ids, 1, 1)

    def _untouch(self, hold: Hold) -> None:
        self.num_blocks -= len(_become(self._refs, hold.ids, -1, 0))
        last = _become(self._all_refs, hold.ids, -1, 0)
        # Tail first: its hash covers the most tokens, so it is the least likely to be hit again.
        self._pool.free_blocks(reversed(_those(hold.blocks, last)))


def _become(refs: Any, ids: BlockIds, change: int, number: int) -> Any:
    """Change the references of these distinct blocks; return the places in `ids` of the blocks
    that have exactly `number` afterwards."""
    changed = refs[ids] + change
    refs[ids] = changed
    return (changed == number).nonzero()[0]


def _those(blocks: Sequence[Any], places: Any) -> Sequence[Any]:
    """The blocks at these places, usually all or none."""
    if len(places) == len(blocks):
        return blocks
    return list(map(blocks.__getitem__, places.tolist()))  # in C: there may be thousands
