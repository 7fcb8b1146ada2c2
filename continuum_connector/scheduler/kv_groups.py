"""KvGroups: how vLLM's KV groups name blocks, and which of them a prefix hit needs.

All groups share one block pool, so a block id belongs to one group at a time. What a hit of h
tokens needs depends on the group: of full attention all blocks before h, of a sliding window only
the last window, of chunked attention the blocks of its chunk, and of states the block that ends at
h (vLLM v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens). vLLM itself says which
blocks a hit in VRAM will need (HitRule), but it knows nothing of DRAM.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from continuum_connector.messages import BlockIds

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
Key = bytes  # vLLM's BlockHashWithGroupId: block hash, then the KV group in 4 bytes
_KEY, _NUMBER = operator.attrgetter("block_hash"), operator.attrgetter("block_id")

# What the next token reads of a group: all tokens before it, a window of the last tokens, the
# tokens of its own chunk, or the state after the last token.
FULL, WINDOW, CHUNKED, STATE = "full", "window", "chunked", "state"


@dataclass(frozen=True)
class KvGroup:
    """One KV group. `window`: tokens per window or per chunk; None for other kinds."""

    index: int
    block_size: int
    kind: str = FULL
    window: int | None = None


# Blocks of one group: where each ends (in tokens), the blocks, their keys.
Column = tuple[Sequence[int], Sequence[Any], Sequence[Key]]


def block_key(block_hash: bytes, group: int) -> Key:
    """The name of a block in vLLM's prefix cache (make_block_hash_with_group_id)."""
    return block_hash + group.to_bytes(4, "big")


def full_keys(hashes: Sequence[bytes]) -> list[Key]:
    """The names of a model's blocks of full attention."""
    suffix = block_key(b"", 0)
    return [block_hash + suffix for block_hash in hashes]


def ids_of(blocks: Sequence[Any]) -> BlockIds:
    """The numbers of these blocks; in C, because there may be thousands."""
    return np.fromiter(map(_NUMBER, blocks), np.int32, len(blocks))


@dataclass(frozen=True, eq=False, slots=True)
class ChainBlocks:
    """Blocks of one chain, head first over all groups: cutting the tail leaves a prefix.

    The blocks are kept in columns, because a pin of 10^4 blocks lives for minutes, and the garbage
    collector would look at every further object per block. `ends`: where in the chain each block
    ends, in tokens, as groups may have blocks of different sizes. `ids`: the blocks' numbers.
    `keys`: by which vLLM's prefix cache found them when they were put together.
    """

    blocks: tuple[Any, ...]
    ends: Sequence[int]
    ids: BlockIds
    keys: tuple[Key, ...]

    @classmethod
    def of(cls, groups: Sequence[Column]) -> ChainBlocks:
        """Merge the blocks of all groups into one chain."""
        if len(groups) == 1:
            ends, blocks, keys = groups[0]
        else:
            places = sorted(
                (end, group, number)
                for group, (ends, _, _) in enumerate(groups)
                for number, end in enumerate(ends)
            )
            blocks = [groups[group][1][number] for _, group, number in places]
            keys = [groups[group][2][number] for _, group, number in places]
            ends = [end for end, _, _ in places]
        return cls(tuple(blocks), ends, ids_of(blocks), tuple(keys))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """Where in the chain the last block ends, in tokens."""
        return self.ends[-1] if self.ends else 0

    def followed_by(self, column: Column) -> ChainBlocks:
        """This chain, of one group, and the blocks of that group that come after it."""
        if not self.blocks:
            return ChainBlocks.of([column])
        ends, blocks, keys = column
        if not blocks:
            return self
        return ChainBlocks(
            (*self.blocks, *blocks),
            _joined(self.ends, ends),
            np.concatenate((self.ids, ids_of(blocks))),
            (*self.keys, *keys),
        )

    def read_again(self) -> ChainBlocks:
        """The same blocks with the keys that they have by now. A key is None if vLLM has forgotten
        it while a pin held the block (BlockPool.evict_blocks)."""
        keys = tuple([block.block_hash for block in self.blocks])
        return ChainBlocks(self.blocks, self.ends, self.ids, keys)

    def only(self, numbers: Sequence[int]) -> ChainBlocks:
        """The blocks at these places in the chain, counted from 0."""
        return ChainBlocks(
            tuple([self.blocks[n] for n in numbers]),
            [self.ends[n] for n in numbers],
            self.ids[np.array(numbers, int)],
            tuple([self.keys[n] for n in numbers]),
        )


NO_BLOCKS = ChainBlocks((), (), np.empty(0, np.int32), ())


class KvGroups:
    """The groups of one model. Callers count in tokens.

    There are three sizes, in tokens. `hash_size` is what one block hash covers. A group's
    `block_size` is what a block of its table holds: one or more hashes. Loads begin and end at
    multiples of `scheduler_size`, where blocks of every group end (vLLM
    v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).

    `rule` (coordinator.HitRule) says what the next turn will hit. It is None if that is every block
    with a hash, as with one group of full attention. `lookup` (coordinator.Shadow) says what a load
    can bring. It is None if that is every block from the first on.

    A turn's end looks at each of its blocks, 4,000 for 64k tokens. What it does per block is left
    to C, and `key_of` reads a block's key without the Python call that vLLM's property is.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        hash_size: int,
        rule: Any = None,
        lookup: Any = None,
        num_proof_tokens: int = 0,
        key_of: Callable[[Any], Any] = _KEY,
    ) -> None:
        """`num_proof_tokens`: tokens that a lookup drops for draft models."""
        self._groups = tuple(groups)
        self.hash_size = hash_size
        self.rule = rule
        self.lookup = lookup
        self.num_proof_tokens = num_proof_tokens
        self._key_of = key_of
        self.scheduler_size = math.lcm(*(group.block_size for group in groups))
        self.num_full = sum(group.kind == FULL for group in groups)
        self.num_states = sum(group.kind == STATE for group in groups)
        # How many blocks a running request takes at most beyond those that its new tokens fill: one
        # more of each group, and for states a copy of the one it continues from
        # (`has_partial_hit`).
        self.most_new = len(groups) + self.num_states
        self._sizes = tuple(Counter(group.block_size for group in groups).items())
        full = (group.block_size for group in groups if group.kind == FULL)
        self._full_sizes = tuple(Counter(full).items())

    def asking(self, rule: Any, lookup: Any, num_proof_tokens: int = 0) -> KvGroups:
        """The same groups, of a vLLM that can be asked what a hit needs."""
        return KvGroups(self._groups, self.hash_size, rule, lookup, num_proof_tokens, self._key_of)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[KvGroup]:
        return iter(self._groups)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` of one request fill, if every group keeps all of them."""
        return _num_blocks(self._sizes, num_tokens)

    def least_blocks(self, num_tokens: int) -> int:
        """How many blocks a request of `num_tokens` holds at least."""
        return self.num_full_blocks(num_tokens) + len(self._groups) - self.num_full

    def num_full_blocks(self, num_tokens: int) -> int:
        """How many blocks of full attention `num_tokens` fill. What other groups need depends on
        how many tokens they skip."""
        return _num_blocks(self._full_sizes, num_tokens)

    def last_end(self, num_tokens: int) -> int:
        """The latest token at which a load for a prompt of `num_tokens` may end. At least one token
        is left to compute, because its logits are needed."""
        return (num_tokens - 1) // self.scheduler_size * self.scheduler_size

    def prompts_end(self, request: Any) -> int:
        """The longest hit that another prompt with the same beginning can have in this request's
        prompt, in tokens. Tokens that a lookup drops for draft models are left out."""
        return max(0, self.last_end(request.num_prompt_tokens - self.num_proof_tokens))

    def departs_at(self, request: Any, num_found: int) -> int:
        """Where this request's prompt departed from what others had left, in tokens, if it found
        `num_found`. vLLM keeps windows and states there, if more of full attention was found."""
        return max(num_found, getattr(request, "shared_prefix_boundary", 0))

    @property
    def are_simple(self) -> bool:
        """Whether a hit needs every block before its end, and nothing else."""
        return len(self._groups) == self.num_full == 1

    def start_of(self, key: Key, end: int) -> int:
        """Where in its chain a block begins that has this key and ends at `end`.

        A partly filled block ends at no multiple of its group's block size. It is reported as the
        last of its hashes alone, as vLLM does (v1/core/block_pool.py, cache_partial_block).
        """
        size = self._groups[int.from_bytes(key[-4:], "big")].block_size
        return end - (self.hash_size if end % size else size)

    def take_kept(
        self,
        tables: Sequence[Sequence[Any]],
        request: Any,
        also: Iterable[int] = (),
        known: ChainBlocks = NO_BLOCKS,
    ) -> ChainBlocks:
        """Return the blocks of a finished turn that the next one will hit. Once per turn, because
        the rule hashes what the turn kept for that hit, and forgets the turn.

        `tables`: the turn's blocks per group; if there are none, it computed nothing to keep.
        `also`: ends of shorter hits, in tokens, whose blocks are returned, too. `known`: see
        `hashed_blocks`.
        """
        if self.rule is None:
            return self.hashed_blocks(tables, request.block_hashes, known)
        if not any(tables):
            return NO_BLOCKS
        kept = self.rule.take_kept(request, also)
        return ChainBlocks.of([(ends, each, list(map(self._key_of, each))) for ends, each in kept])

    def hashed_blocks(
        self,
        tables: Sequence[Sequence[Any]],
        hashes: Sequence[bytes],
        known: ChainBlocks = NO_BLOCKS,
    ) -> ChainBlocks:
        """Return every full block of a request that still has the hash of its tokens.

        Only such blocks can be found again; null blocks (outside a window) are skipped. `known`: a
        chain that the request may go on from. If it does, only what follows is put together.
        """
        if self.are_simple and self._goes_on(tables[0], known):
            return known.followed_by(self._hashed(self._groups[0], tables[0], hashes, len(known)))
        each = zip(self._groups, tables, strict=True)
        return ChainBlocks.of([self._hashed(group, blocks, hashes, 0) for group, blocks in each])

    def _goes_on(self, blocks: Sequence[Any], known: ChainBlocks) -> bool:
        """Whether these blocks begin with the known chain. Each is compared, because two blocks may
        have one hash, and so is its key, because vLLM may have forgotten it (evict_blocks)."""
        first = tuple(blocks[: len(known)])
        return first == known.blocks and tuple(map(self._key_of, first)) == known.keys

    def _hashed(
        self, group: KvGroup, blocks: Sequence[Any], hashes: Sequence[bytes], start: int
    ) -> Column:
        """The group's blocks from the `start`th on that have the hash of their tokens."""
        suffix, size = block_key(b"", group.index), group.block_size
        per_block = size // self.hash_size  # a block is named by the last of its hashes
        ends_of = hashes[start:] if per_block == 1 else hashes[per_block - 1 :: per_block][start:]
        blocks = blocks[start : start + len(ends_of)]
        keys = list(map(operator.add, ends_of[: len(blocks)], repeat(suffix)))
        named = list(map(self._key_of, blocks))
        ends: Sequence[int] = range(size * (start + 1), size * (start + len(blocks)) + 1, size)
        if named[:-1] == keys[:-1]:  # the last one is full, and its last token not computed
            num = len(named) - (named[-1:] != keys[-1:])
            return ends[:num], blocks[:num], named[:num]
        kept = [n for n, key in enumerate(keys) if named[n] == key]
        return [ends[n] for n in kept], [blocks[n] for n in kept], [named[n] for n in kept]


def _joined(ends: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """Both, one after the other; of a chain of one group without gaps no number is made."""
    if isinstance(ends, range) and isinstance(more, range):
        return range(ends.start, more.stop, more.step)
    return [*ends, *more]


def _num_blocks(sizes: Sequence[tuple[int, int]], num_tokens: int) -> int:
    """`sizes`: block sizes in tokens, each with its number of groups. Called in every step."""
    num_blocks = 0
    for size, num_groups in sizes:
        num_blocks += -(-num_tokens // size) * num_groups
    return num_blocks
