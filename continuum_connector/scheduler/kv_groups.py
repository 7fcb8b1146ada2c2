"""KvGroups: how vLLM's KV groups name blocks, and which of them a prefix hit needs.

All groups share one block pool, so a block id belongs to one group at a time, and a hit
of h tokens needs all blocks before h of full-attention groups, but only the last window of
sliding-window groups, those of its chunk of chunked ones, and of groups of states the one that
ends at h (vLLM v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens).
Which blocks a hit in VRAM will need, vLLM itself says (HitRule); of DRAM it knows nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]  # numbers of blocks
Key = bytes  # vLLM's BlockHashWithGroupId: block hash, then the KV group in 4 bytes

# What the next token reads of a group: all tokens before it, the last so many, those of its own
# chunk, or the state after the last.
FULL, WINDOW, CHUNKED, STATE = "full", "window", "chunked", "state"


@dataclass(frozen=True)
class KvGroup:
    """One KV group. `window`: tokens of a window or of a chunk, else None."""

    index: int
    block_size: int
    kind: str = FULL
    window: int | None = None


class HitRule(Protocol):
    """vLLM's own rule for prefix hits (coordinator.py)."""

    is_on: bool
    gives_way: bool

    @property
    def most_spare(self) -> int: ...
    def kept(
        self, request: Any, prompts_end: int
    ) -> Sequence[tuple[Sequence[int], Sequence[Any]]]: ...
    def give_up_spare(self, requests: Mapping[str, Any]) -> bool: ...
    def waits_for_step(self, found: Any) -> bool: ...


class Lookup(Protocol):
    """The same rule for what a load can bring (shadow.py). Tokens cross this border."""

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, limit: int, has: Callable[[Key], bool]
    ) -> int: ...
    def first_read(self, group: int, hit: int) -> int: ...


def block_key(block_hash: bytes, group: int) -> Key:
    """The name of a block in vLLM's prefix cache (make_block_hash_with_group_id)."""
    return block_hash + group.to_bytes(4, "big")


@dataclass(frozen=True, eq=False, slots=True)
class ChainBlocks:
    """Blocks of one chain, head first over all groups: cutting the tail leaves a prefix.

    Columns, for a pin of 10^4 blocks lives for minutes, and the garbage collector looks at every
    object that it has beside them. `ends`: where in the chain each block ends, in tokens, for
    groups may have blocks of different sizes; `ids`: their numbers.
    """

    blocks: tuple[Any, ...]
    ends: Sequence[int]
    ids: Ids

    @classmethod
    def of(cls, groups: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> ChainBlocks:
        """Put together each group's ends and blocks."""
        if len(groups) == 1:
            ends, blocks = groups[0]
        else:
            places = sorted(
                (end, group, number)
                for group, (ends, _) in enumerate(groups)
                for number, end in enumerate(ends)
            )
            blocks = [groups[group][1][number] for _, group, number in places]
            ends = [end for end, _, _ in places]
        return cls(tuple(blocks), ends, np.array([block.block_id for block in blocks], np.int32))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """Where in the chain the last one ends."""
        return self.ends[-1] if self.ends else 0

    @property
    def keys(self) -> list[Key]:
        """What vLLM's prefix cache finds each by."""
        return [block.block_hash for block in self.blocks]

    def only(self, numbers: Sequence[int]) -> ChainBlocks:
        """Those of them that have these numbers, counted from 0."""
        blocks = tuple([self.blocks[n] for n in numbers])
        return ChainBlocks(
            blocks, [self.ends[n] for n in numbers], self.ids[np.array(numbers, int)]
        )


NO_BLOCKS = ChainBlocks((), (), np.empty(0, np.int32))


class KvGroups:
    """The groups of one model. Whoever asks them counts in tokens.

    Three sizes, in tokens: `hash_size`, what a block hash covers; a group's `block_size`, what a
    block of its table holds, some hashes; `scheduler_size`, at whose multiples loads begin and
    end, as every group's blocks do (vLLM v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).

    `rule` says what the next turn will hit. None where that is every block with a hash: one group
    of full attention. `lookup` says what a load can bring; None where that is every block from the
    first on.
    """

    def __init__(self, groups: Sequence[KvGroup], hash_size: int) -> None:
        self._groups = tuple(groups)
        self.rule: HitRule | None = None
        self.lookup: Lookup | None = None
        self.hash_size = hash_size
        self.scheduler_size = math.lcm(*(group.block_size for group in groups))
        self.num_full = sum(group.kind == FULL for group in groups)
        self.num_states = sum(group.kind == STATE for group in groups)
        # What a request that runs takes at most beside a block for each block of new tokens: one
        # more of each group, and of states a copy of what it goes on from (`has_partial_hit`).
        self.most_new = len(groups) + self.num_states
        self.num_proof_tokens = 0  # that a lookup drops for drafts
        self._sizes = tuple(Counter(group.block_size for group in groups).items())
        full = (group.block_size for group in groups if group.kind == FULL)
        self._full_sizes = tuple(Counter(full).items())

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[KvGroup]:
        return iter(self._groups)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens of one request fill, all of them counted in each group."""
        return _num_blocks(self._sizes, num_tokens)

    def least_blocks(self, num_tokens: int) -> int:
        """How many blocks a request of so many tokens holds at least."""
        return self.num_full_blocks(num_tokens) + len(self._groups) - self.num_full

    def num_full_blocks(self, num_tokens: int) -> int:
        """The same of full attention alone: what others need depends on what is skipped."""
        return _num_blocks(self._full_sizes, num_tokens)

    def last_end(self, num_tokens: int) -> int:
        """Where a load for a prompt of so many tokens may end at most: one token, whose logits are
        wanted, is left to compute."""
        return (num_tokens - 1) // self.scheduler_size * self.scheduler_size

    def prompts_end(self, request: Any) -> int:
        """Where the request's prompt is hit at most by another that begins like it, drafts too."""
        return max(0, self.last_end(request.num_prompt_tokens - self.num_proof_tokens))

    @property
    def are_simple(self) -> bool:
        """Whether a hit needs every block before its end, and nothing else."""
        return len(self._groups) == self.num_full == 1

    def start_of(self, key: Key, end: int) -> int:
        """Where in its chain the block begins that has this key and ends there. One that ends amid
        what its group's blocks hold is told by the last of its hashes, as vLLM does (v1/core/
        block_pool.py, cache_partial_block)."""
        size = self._groups[int.from_bytes(key[-4:], "big")].block_size
        return end - (self.hash_size if end % size else size)

    def kept(
        self,
        pool_blocks: Sequence[Any],
        block_ids: Sequence[Sequence[int]],
        request: Any,
        needs_prompt: bool = False,
    ) -> ChainBlocks:
        """Return the blocks of a finished turn that the next one will hit.

        `block_ids`: the turn's blocks per group; without any it computed nothing that is kept.
        `needs_prompt`: what a hit at the prompt's end needs is kept too.
        """
        if self.rule is None:
            return self.hashed_blocks(pool_blocks, block_ids, request.block_hashes)
        if not any(block_ids):
            return NO_BLOCKS
        end = self.prompts_end(request) if needs_prompt else 0
        return ChainBlocks.of(self.rule.kept(request, end))

    def hashed_blocks(
        self,
        pool_blocks: Sequence[Any],
        block_ids: Sequence[Sequence[int]],
        hashes: Sequence[bytes],
    ) -> ChainBlocks:
        """Return every full block of a request that has its hash.

        Only these can be found again; null blocks (outside a window) are skipped.
        """
        found: list[tuple[Sequence[int], list[Any]]] = []
        for group, ids in zip(self._groups, block_ids, strict=True):
            suffix, size = block_key(b"", group.index), group.block_size
            per_block = size // self.hash_size  # a block goes by the last of its hashes
            ends_of = hashes if per_block == 1 else hashes[per_block - 1 :: per_block]
            blocks = [pool_blocks[block_id] for block_id in ids[: len(ends_of)]]
            keys = [block_hash + suffix for block_hash in ends_of[: len(blocks)]]
            named = [block.block_hash for block in blocks]
            ends: Sequence[int] = range(size, size * len(blocks) + 1, size)
            if named != keys:
                kept = [n for n, key in enumerate(keys) if named[n] == key]
                blocks, ends = [blocks[n] for n in kept], [ends[n] for n in kept]
            found.append((ends, blocks))
        return ChainBlocks.of(found)


def _num_blocks(sizes: Sequence[tuple[int, int]], num_tokens: int) -> int:
    """`sizes`: of blocks in tokens, and how many groups have such; asked in every step."""
    num_blocks = 0
    for size, num_groups in sizes:
        num_blocks += -(-num_tokens // size) * num_groups
    return num_blocks
