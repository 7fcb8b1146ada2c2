"""What a prefix hit needs of each KV group, against attention spelled out token by token."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from continuum_connector.scheduler.kv_groups import (
    FULL,
    STATE,
    WINDOW,
    Key,
    KvGroup,
    KvGroups,
    block_key,
)

HASHES = [bytes([i]) * 4 for i in range(12)]


@dataclass
class FakeBlock:
    """The part of vLLM's KVCacheBlock that is looked at."""

    block_hash: Key | None
    block_id: int = 0


def groups(size: int, *windows: int | None) -> KvGroups:
    kinds = [FULL if window is None else WINDOW for window in windows]
    which = zip(kinds, windows, strict=True)
    return KvGroups(
        [KvGroup(i, size, kind, window) for i, (kind, window) in enumerate(which)], size
    )


def test_tokens_are_counted_in_blocks_of_each_groups_own_size() -> None:
    """As of DeepSeek V4, whose hashes are of 4 tokens: none of the three sizes is another."""
    windows = [KvGroup(i, 64, WINDOW, 100) for i in (1, 2)]
    of_v4 = KvGroups([KvGroup(0, 256), *windows, KvGroup(3, 8)], 4)
    assert (of_v4.hash_size, of_v4.scheduler_size) == (4, 256)
    assert of_v4.num_blocks(257) == 2 + 5 + 5 + 33
    assert of_v4.num_full_blocks(257) == 2 + 33
    assert KvGroups([KvGroup(0, 48), KvGroup(1, 32)], 16).scheduler_size == 96
    assert [of_v4.last_end(n) for n in (1, 256, 257, 512, 513)] == [0, 0, 256, 256, 512]


def test_hashed_blocks_are_the_full_ones_head_first_over_all_groups() -> None:
    which = groups(16, None, 32)
    pool = [FakeBlock(None, n) for n in range(10)]
    for block_id, (index, group) in {1: (0, 0), 2: (1, 0), 3: (2, 0), 5: (2, 1)}.items():
        pool[block_id].block_hash = block_key(HASHES[index], group)
    pool[4].block_hash = block_key(HASHES[9], 1)  # has become somebody else's
    block_ids = [[1, 2, 3, 6], [0, 4, 5, 7]]  # 0 is the null block, 6 and 7 are not full
    tables = [[pool[number] for number in ids] for ids in block_ids]
    found = which.hashed_blocks(tables, HASHES)
    assert found.blocks == (pool[1], pool[2], pool[3], pool[5])
    assert (found.ends, found.end) == ([16, 32, 48, 48], 48)
    assert found.ids.tolist() == [1, 2, 3, 5]
    assert found.only([1, 3]).ids.tolist() == [2, 5]
    assert not which.hashed_blocks([[], []], HASHES)
    assert len(which.hashed_blocks(tables, HASHES[:1])) == 1
    assert (which.num_full, len(which)) == (1, 2)


def test_blocks_of_several_sizes_go_by_the_last_of_their_hashes() -> None:
    which = KvGroups([KvGroup(0, 32), KvGroup(1, 8, WINDOW, 16), KvGroup(2, 32, STATE)], 8)
    pool = [FakeBlock(None, n) for n in range(10)]
    for block_id, (number, group) in {
        1: (3, 0),
        2: (7, 0),
        3: (5, 1),
        4: (6, 1),
        5: (7, 2),
    }.items():
        pool[block_id].block_hash = block_key(HASHES[number], group)
    block_ids = [[1, 2], [0, 0, 0, 0, 0, 3, 4], [0, 5]]
    tables = [[pool[number] for number in ids] for ids in block_ids]
    found = which.hashed_blocks(tables, HASHES[:8])
    assert found.blocks == tuple(pool[i] for i in (1, 3, 4, 2, 5))
    assert (found.ends, found.end) == ([32, 48, 56, 64, 64], 64)
    assert [group.kind for group in which] == [FULL, WINDOW, STATE]


def test_no_object_is_made_per_block_of_a_turn() -> None:
    """A pin has them for minutes, and every full collection would stop the engine for each."""
    hashes = [i.to_bytes(4, "big") for i in range(10_000)]
    pool = [FakeBlock(None), *(FakeBlock(block_key(each, 0)) for each in hashes)]
    table = pool[1:]
    which = groups(16, None)
    made = []
    for _ in range(20):  # other threads of the process make objects now and then
        gc.collect()
        before = len(gc.get_objects())
        found = which.hashed_blocks([table], hashes)
        stored = found.only(range(9_000))
        made.append(len(gc.get_objects()) - before)
    assert min(made) < 10
    assert (len(found), len(stored), stored.end) == (10_000, 9_000, 16 * 9_000)


def test_a_known_chain_is_gone_on_from_only_if_each_block_and_key_is_the_same() -> None:
    which = groups(16, None)
    pool = [FakeBlock(block_key(HASHES[n], 0), n) for n in range(6)]
    known = which.hashed_blocks([pool[:3]], HASHES)
    found = which.hashed_blocks([pool], HASHES, known)
    assert (found.blocks, found.ids.tolist()) == (tuple(pool), list(range(6)))
    assert found.ends == range(16, 97, 16)
    assert found.keys[:3] == known.keys
    assert all(a is b for a, b in zip(found.keys, known.keys, strict=False))
    assert which.hashed_blocks([pool[:3]], HASHES, known) is known

    again = FakeBlock(block_key(HASHES[1], 0), 9)  # another block with the same hash
    found = which.hashed_blocks([[pool[0], again, *pool[2:]]], HASHES, known)
    assert found.ids.tolist() == [0, 9, 2, 3, 4, 5]
    pool[1].block_hash = None  # BlockPool.evict_blocks, after a load that failed
    found = which.hashed_blocks([pool], HASHES, known)
    assert (found.ids.tolist(), found.ends) == ([0, 2, 3, 4, 5], [16, 48, 64, 80, 96])
    assert which.hashed_blocks([pool], HASHES, found).ids.tolist() == [0, 2, 3, 4, 5]
    assert which.hashed_blocks([pool[:2]], HASHES, known).ids.tolist() == [0]  # it was cut


def test_the_last_block_may_be_full_before_its_last_token_is_computed() -> None:
    which = groups(16, None)
    pool = [FakeBlock(block_key(HASHES[n], 0), n) for n in range(3)]
    pool[2].block_hash = None
    found = which.hashed_blocks([pool], HASHES[:3])
    assert (found.ids.tolist(), found.ends) == ([0, 1], range(16, 33, 16))
