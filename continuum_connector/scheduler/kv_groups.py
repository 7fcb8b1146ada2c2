"""KvGroups: how vLLM's KV groups name blocks, and which of them a prefix hit needs.

All groups share one block pool, so a block id belongs to one group at a time, and a hit
of h blocks needs blocks [0, h) of full-attention groups but only the last window of
sliding-window groups (vLLM v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens).
Which blocks a hit in VRAM will need, vLLM itself says (HitRule); of DRAM it knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from continuum_connector.scheduler.slots import Key


@dataclass(frozen=True)
class KvGroup:
    """One KV group. `window`: attention span in tokens, or None for full attention."""

    index: int
    block_size: int
    window: int | None = None


class HitRule(Protocol):
    """vLLM's own rule for prefix hits (coordinator.py)."""

    is_on: bool

    def kept(self, request: Any) -> Sequence[Sequence[Any]]: ...


def block_key(block_hash: bytes, group: int) -> Key:
    """The name of a block in vLLM's prefix cache (make_block_hash_with_group_id)."""
    return block_hash + group.to_bytes(4, "big")


class KvGroups:
    """The groups of one model; all have one block size, which is also that of the hashes.

    `rule` says what the next turn will hit. None where that is every block with a hash: one group
    of full attention.
    """

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self._groups = tuple(groups)
        self.rule: HitRule | None = None
        self.block_size = groups[0].block_size
        self.num_full = sum(group.window is None for group in groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[KvGroup]:
        return iter(self._groups)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens of one request fill, windows counted whole."""
        return int(-(-num_tokens // self.block_size)) * len(self._groups)

    @property
    def are_simple(self) -> bool:
        """Whether a hit needs every block before its end, and nothing else."""
        return len(self._groups) == self.num_full == 1

    def kept(
        self, pool_blocks: Sequence[Any], block_ids: Sequence[Sequence[int]], request: Any
    ) -> list[tuple[int, int, Any]]:
        """Return (index, group, block) of every block of a finished turn that the next one will
        hit, head of the chain first over all groups.

        `block_ids`: the turn's blocks per group; without any it computed nothing that is kept.
        """
        if self.rule is None:
            return self.hashed_blocks(pool_blocks, block_ids, request.block_hashes)
        if not any(block_ids):
            return []
        found = [
            (index, group, block)
            for group, blocks in enumerate(self.rule.kept(request))
            for index, block in enumerate(blocks)
            if not block.is_null
        ]
        return sorted(found, key=itemgetter(0, 1))

    def hashed_blocks(
        self,
        pool_blocks: Sequence[Any],
        block_ids: Sequence[Sequence[int]],
        hashes: Sequence[bytes],
    ) -> list[tuple[int, int, Any]]:
        """Return (index, group, block) of every full block of a request that has its hash.

        Head of the chain first, over all groups, so that cutting the tail leaves a prefix.
        Only these can be found again; null blocks (outside a window) are skipped.
        """
        found = []
        length = min(len(hashes), max((len(ids) for ids in block_ids), default=0))
        suffixes = [group.to_bytes(4, "big") for group in range(len(block_ids))]
        for index in range(length):
            block_hash = hashes[index]
            for group, ids in enumerate(block_ids):
                if index >= len(ids) or not ids[index]:
                    continue
                block = pool_blocks[ids[index]]
                if block.block_hash == block_hash + suffixes[group]:
                    found.append((index, group, block))
        return found

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, end: int, has: Callable[[Key], bool]
    ) -> int:
        """Return the largest h in [start, end] such that `has` all that a hit of h blocks
        needs beyond the first `start`, which are in VRAM already."""
        end = min(end, len(hashes))
        full = [group.index for group in self._groups if group.window is None]
        limit = start
        while limit < end and all(has(block_key(hashes[limit], g)) for g in full):
            limit += 1
        gap: int | None = limit
        while gap is not None:
            limit = gap
            gap = self._last_gap(hashes, start, limit, has)
        return limit

    def first_needed(self, group: KvGroup, hit: int, start: int) -> int:
        """Index of the first block of `group` that a hit of `hit` blocks reads, from `start` on."""
        if group.window is None:
            return start
        # As many as vLLM's lookup asks for (_contiguous_blocks_for_hit) and a load gets blocks
        # for: the next token is one of the window.
        return max(start, (hit * self.block_size - group.window + 1) // self.block_size, 0)

    def _last_gap(
        self, hashes: Sequence[bytes], start: int, hit: int, has: Callable[[Key], bool]
    ) -> int | None:
        """Index of the last block that a window before `hit` lacks; every hit between needs
        it too, since windows move with the hit. None if all is there."""
        for group in self._groups:
            if group.window is None:
                continue
            for index in range(hit - 1, self.first_needed(group, hit, start) - 1, -1):
                if not has(block_key(hashes[index], group.index)):
                    return index
        return None
