"""KvGroups: how vLLM's KV groups name blocks, and which of them a prefix hit needs.

All groups share one block pool, so a block id belongs to one group at a time, and a hit
of h blocks needs blocks [0, h) of full-attention groups but only the last window of
sliding-window groups (vLLM v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens).
Which blocks a hit in VRAM will need, vLLM itself says (HitRule); of DRAM it knows nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Key = bytes  # vLLM's BlockHashWithGroupId: block hash, then the KV group in 4 bytes


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


@dataclass(frozen=True, eq=False, slots=True)
class ChainBlocks:
    """Blocks of one chain, head first over all groups: cutting the tail leaves a prefix.

    Columns, for a pin of 10^4 blocks lives for minutes, and the garbage collector looks at every
    object that it has beside them. `indexes`: each block's place in the chain.
    """

    blocks: tuple[Any, ...] = ()
    indexes: Sequence[int] = ()

    @classmethod
    def of(cls, groups: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> ChainBlocks:
        """Put together each group's indexes and blocks."""
        if len(groups) == 1:
            return cls(tuple(groups[0][1]), groups[0][0])
        places = sorted(
            (index, group, number)
            for group, (indexes, _) in enumerate(groups)
            for number, index in enumerate(indexes)
        )
        blocks = tuple(groups[group][1][number] for _, group, number in places)
        return cls(blocks, [index for index, _, _ in places])

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """Where in the chain they end: one more than the last one's place."""
        return self.indexes[-1] + 1 if self.indexes else 0

    @property
    def keys(self) -> list[Key]:
        """What vLLM's prefix cache finds each by."""
        return [block.block_hash for block in self.blocks]

    def only(self, numbers: Sequence[int]) -> ChainBlocks:
        """Those of them that have these numbers, counted from 0."""
        blocks = tuple(self.blocks[n] for n in numbers)
        return ChainBlocks(blocks, [self.indexes[n] for n in numbers])


NO_BLOCKS = ChainBlocks()


class KvGroups:
    """The groups of one model. Whoever asks them counts in tokens.

    Three sizes, in tokens, are one for all models that we serve (proven.check_groups), and still
    are not the same: `hash_size`, what a block hash covers; a group's `block_size`, what a block
    of its table holds; `scheduler_size`, at whose multiples loads begin and end, as every group's
    blocks do (vLLM v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).

    `rule` says what the next turn will hit. None where that is every block with a hash: one group
    of full attention.
    """

    def __init__(self, groups: Sequence[KvGroup], hash_size: int) -> None:
        self._groups = tuple(groups)
        self.rule: HitRule | None = None
        self.hash_size = hash_size
        self.scheduler_size = math.lcm(*(group.block_size for group in groups))
        self.num_full = sum(group.window is None for group in groups)
        self._sizes = tuple(Counter(group.block_size for group in groups).items())
        full = (group.block_size for group in groups if group.window is None)
        self._full_sizes = tuple(Counter(full).items())

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[KvGroup]:
        return iter(self._groups)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens of one request fill, windows counted whole."""
        return _num_blocks(self._sizes, num_tokens)

    def num_full_blocks(self, num_tokens: int) -> int:
        """The same of full attention alone: what a window needs depends on what is skipped."""
        return _num_blocks(self._full_sizes, num_tokens)

    def last_end(self, num_tokens: int) -> int:
        """Where a load for a prompt of so many tokens may end at most: one token, whose logits are
        wanted, is left to compute."""
        return (num_tokens - 1) // self.scheduler_size * self.scheduler_size

    @property
    def are_simple(self) -> bool:
        """Whether a hit needs every block before its end, and nothing else."""
        return len(self._groups) == self.num_full == 1

    def kept(
        self, pool_blocks: Sequence[Any], block_ids: Sequence[Sequence[int]], request: Any
    ) -> ChainBlocks:
        """Return the blocks of a finished turn that the next one will hit.

        `block_ids`: the turn's blocks per group; without any it computed nothing that is kept.
        """
        if self.rule is None:
            return self.hashed_blocks(pool_blocks, block_ids, request.block_hashes)
        if not any(block_ids):
            return NO_BLOCKS
        found = []
        for blocks in self.rule.kept(request):
            indexes = [index for index, block in enumerate(blocks) if not block.is_null]
            found.append((indexes, [blocks[index] for index in indexes]))
        return ChainBlocks.of(found)

    def hashed_blocks(
        self,
        pool_blocks: Sequence[Any],
        block_ids: Sequence[Sequence[int]],
        hashes: Sequence[bytes],
    ) -> ChainBlocks:
        """Return every full block of a request that has its hash.

        Only these can be found again; null blocks (outside a window) are skipped.
        """
        found = []
        for group, ids in enumerate(block_ids):
            suffix = block_key(b"", group)
            indexes = [
                index
                for index, (block_id, block_hash) in enumerate(zip(ids, hashes, strict=False))
                if block_id and pool_blocks[block_id].block_hash == block_hash + suffix
            ]
            found.append((indexes, [pool_blocks[ids[index]] for index in indexes]))
        return ChainBlocks.of(found)

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, end: int, has: Callable[[Key], bool]
    ) -> int:
        """Return the largest h in [start, end] such that `has` all that a hit of h tokens
        needs beyond the first `start`, which are in VRAM already."""
        size = self.hash_size
        limit, last = start // size, min(end // size, len(hashes))
        full = [group.index for group in self._groups if group.window is None]
        while limit < last and all(has(block_key(hashes[limit], g)) for g in full):
            limit += 1
        gap: int | None = limit * size
        while gap is not None:
            hit = gap
            gap = self._last_gap(hashes, start, hit, has)
        return hit

    def first_needed(self, group: KvGroup, hit: int, start: int) -> int:
        """Index of the first block of `group` that a hit of `hit` tokens reads, from token `start`
        on."""
        if group.window is None:
            return start // group.block_size
        # As many as vLLM's lookup asks for (_contiguous_blocks_for_hit) and a load gets blocks
        # for: the next token is one of the window.
        return max(start, hit - group.window + 1, 0) // group.block_size

    def _last_gap(
        self, hashes: Sequence[bytes], start: int, hit: int, has: Callable[[Key], bool]
    ) -> int | None:
        """Where the last block begins that a window before `hit` lacks; every hit between needs
        it too, since windows move with the hit. None if all is there."""
        for group in self._groups:
            if group.window is None:
                continue
            size, first = group.block_size, self.first_needed(group, hit, start)
            for index in range(hit // size - 1, first - 1, -1):
                if not has(block_key(hashes[index], group.index)):
                    return index * size
        return None


def _num_blocks(sizes: Sequence[tuple[int, int]], num_tokens: int) -> int:
    """`sizes`: of blocks in tokens, and how many groups have such; asked in every step."""
    num_blocks = 0
    for size, num_groups in sizes:
        num_blocks += -(-num_tokens // size) * num_groups
    return num_blocks
