"""What a prefix hit needs of each KV group, against attention spelled out token by token."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.kv_groups import Key, KvGroup, KvGroups, block_key

HASHES = [bytes([i]) * 4 for i in range(12)]


@dataclass
class FakeBlock:
    """The part of vLLM's KVCacheBlock that is looked at."""

    block_hash: Key | None


def groups(size: int, *windows: int | None) -> KvGroups:
    return KvGroups([KvGroup(i, size, window) for i, window in enumerate(windows)], size)


def can_start_at(hit: int, start: int, have: set[Key], which: KvGroups) -> bool:
    """Whether all that the token after `hit` blocks and every later one attends to is there.

    `start` blocks are in VRAM.
    """
    size, position = which.hash_size, hit * which.hash_size
    for group in which:
        first = 0 if group.window is None else max(0, position - group.window + 1)
        read = {token // size for token in range(first, position)}
        if any(i >= start and block_key(HASHES[i], group.index) not in have for i in read):
            return False
    return True


@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.sampled_from([None, 1, 4, 10, 33, 64]), min_size=1, max_size=3),
    st.sets(st.tuples(st.integers(0, 11), st.integers(0, 2))),
    st.integers(0, 5),
    st.integers(0, 14),
)
@settings(max_examples=120, deadline=None)
def test_the_longest_hit_is_the_longest_that_attention_can_start_from(
    size: int, windows: list[int | None], missing: set[tuple[int, int]], start: int, end: int
) -> None:
    which = groups(size, *windows)
    every = {block_key(h, g) for h in HASHES for g in range(len(windows))}
    have = every - {block_key(HASHES[i], g) for i, g in missing}
    hits = [h for h in range(start, min(end, 12) + 1) if can_start_at(h, start, have, which)]
    expected = max(hits, default=start)
    found = which.longest_hit(HASHES, start * size, end * size, have.__contains__)
    assert found == expected * size


def test_a_lookup_costs_no_more_than_the_chain_is_long() -> None:
    which, hashes = groups(1, None, 100), [i.to_bytes(4, "big") for i in range(2000)]
    stored = {block_key(hashes[i], 1) for i in range(300, 398)}  # one block short of a window
    num_asked = 0

    def has(key: Key) -> bool:
        nonlocal num_asked
        num_asked += 1
        return key[-1] == 0 or key in stored

    assert which.longest_hit(hashes, 0, 2000, has) == 0
    assert num_asked <= 2 * 2000


def test_nothing_beyond_the_end_is_looked_up() -> None:
    which = groups(16, None, 64)
    asked: list[Key] = []

    def has(key: Key) -> bool:
        asked.append(key)
        return True

    assert which.longest_hit(HASHES, 2 * 16, 5 * 16, has) == 5 * 16
    assert {key[0] for key in asked} == {2, 3, 4}
    assert which.longest_hit(HASHES, 5 * 16, 5 * 16, has) == 5 * 16
    found = which.longest_hit(HASHES[:3], 5 * 16, 9 * 16, has)  # fewer hashes than VRAM's hit
    assert found == 5 * 16


@pytest.mark.parametrize(("hit", "start", "first"), [(10, 0, 6), (10, 8, 8), (3, 0, 0), (4, 0, 0)])
def test_a_window_needs_its_last_blocks_only(hit: int, start: int, first: int) -> None:
    which = groups(16, None, 64)
    full, window = which
    assert which.first_needed(window, hit * 16, start * 16) == first
    assert which.first_needed(full, hit * 16, start * 16) == start


def test_tokens_are_counted_in_blocks_of_each_groups_own_size() -> None:
    """As of DeepSeek V4, whose hashes are of 4 tokens: none of the three sizes is another."""
    of_v4 = KvGroups([KvGroup(0, 256), KvGroup(1, 64, 100), KvGroup(2, 64, 100), KvGroup(3, 8)], 4)
    assert (of_v4.hash_size, of_v4.scheduler_size) == (4, 256)
    assert of_v4.num_blocks(257) == 2 + 5 + 5 + 33
    assert of_v4.num_full_blocks(257) == 2 + 33
    assert KvGroups([KvGroup(0, 48), KvGroup(1, 32)], 16).scheduler_size == 96
    assert [of_v4.last_end(n) for n in (1, 256, 257, 512, 513)] == [0, 0, 256, 256, 512]


def test_hashed_blocks_are_the_full_ones_head_first_over_all_groups() -> None:
    which = groups(16, None, 32)
    pool = [FakeBlock(None) for _ in range(10)]
    for block_id, (index, group) in {1: (0, 0), 2: (1, 0), 3: (2, 0), 5: (2, 1)}.items():
        pool[block_id].block_hash = block_key(HASHES[index], group)
    pool[4].block_hash = block_key(HASHES[9], 1)  # has become somebody else's
    block_ids = [[1, 2, 3, 6], [0, 4, 5, 7]]  # 0 is the null block, 6 and 7 are not full
    found = which.hashed_blocks(pool, block_ids, HASHES)
    assert found.blocks == (pool[1], pool[2], pool[3], pool[5])
    assert (found.indexes, found.end) == ([0, 1, 2, 2], 3)
    assert not which.hashed_blocks(pool, [[], []], HASHES)
    assert len(which.hashed_blocks(pool, block_ids, HASHES[:1])) == 1
    assert (which.num_full, len(which)) == (1, 2)


def test_no_object_is_made_per_block_of_a_turn() -> None:
    """A pin has them for minutes, and every full collection would stop the engine for each."""
    hashes = [i.to_bytes(4, "big") for i in range(10_000)]
    pool = [FakeBlock(None), *(FakeBlock(block_key(each, 0)) for each in hashes)]
    block_ids = [list(range(1, 10_001))]
    which = groups(16, None)
    made = []
    for _ in range(5):  # other threads of the process make objects now and then
        gc.collect()
        before = len(gc.get_objects())
        found = which.hashed_blocks(pool, block_ids, hashes)
        stored = found.only(range(9_000))
        made.append(len(gc.get_objects()) - before)
    assert min(made) < 10
    assert (len(found), len(stored), stored.end) == (10_000, 9_000, 9_000)
