"""What a load can bring, by vLLM's own lookup, against attention spelled out token by token."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.kv_groups import block_key
from continuum_connector.vllm.coordinator import Shadow
from tests.vllm.harness import Engine
from tests.vllm.tiering import BLOCK

NUM_BLOCKS = 12
HASHES = [bytes([i]) * 32 for i in range(NUM_BLOCKS)]
EVERY = frozenset((index, group) for index in range(NUM_BLOCKS) for group in range(3))


@functools.cache
def shadow_of(window: int) -> Shadow:
    manager = Engine(50, groups="hybrid", window=window).scheduler.kv_cache_manager
    return Shadow(manager.coordinator, manager.block_pool)


def read(hit: int, window: int, group: int) -> set[int]:
    """The blocks that the token after `hit` tokens and every later one attend to."""
    first = max(0, hit - window + 1) if group else 0
    return {token // BLOCK for token in range(first, hit)}


def can_start_at(hit: int, window: int, start: int, have: set[tuple[int, int]]) -> bool:
    needed = {(i, g) for g in range(3) for i in read(hit, window, g) if i * BLOCK >= start}
    return needed <= have


@given(
    st.sampled_from([16, 17, 18, 40, 64, 65, 72]),
    st.sets(st.sampled_from(sorted(EVERY)), max_size=8),
    st.integers(0, 5),
    st.integers(1, NUM_BLOCKS * BLOCK),
)
@settings(max_examples=150)
def test_the_longest_load_is_the_longest_that_attention_can_start_from(
    window: int, missing: set[tuple[int, int]], start: int, limit: int
) -> None:
    have, in_vram = set(EVERY - missing), min(start * BLOCK, limit // BLOCK * BLOCK)
    keys = {block_key(HASHES[index], group) for index, group in have}
    ends = range(in_vram, limit + 1, BLOCK)
    expected = max(end for end in ends if can_start_at(end, window, in_vram, have))
    found = shadow_of(window).longest_hit(HASHES, in_vram, limit, keys.__contains__)
    full = (end for end in ends if {(i, 0) for i in range(in_vram // BLOCK, end // BLOCK)} <= have)
    assert found == (expected, max(full))


@pytest.mark.parametrize("window", [17, 64, 72])
def test_a_load_gets_blocks_for_what_attention_reads(window: int) -> None:
    shadow = shadow_of(window)
    for hit in range(BLOCK, NUM_BLOCKS * BLOCK + 1, BLOCK):
        for group in range(3):
            first = shadow.first_read(group, hit) // BLOCK
            assert set(range(first, hit // BLOCK)) == read(hit, window, group)


def test_a_lookup_asks_for_no_block_twice_and_for_none_in_vram() -> None:
    asked: list[bytes] = []

    def has(key: bytes) -> bool:
        asked.append(key)
        return True

    start, limit = 4 * BLOCK, 10 * BLOCK
    assert shadow_of(64).longest_hit(HASHES, start, limit, has) == (limit, limit)
    of_full = [key for key in asked if key.endswith(block_key(b"", 0))]
    assert of_full == [block_key(each, 0) for each in HASHES[4:10]]
    assert len(asked) == len(set(asked)) == 6 + 2 * 4


def test_the_scheduler_is_left_as_it_was() -> None:
    manager = Engine(50, groups="hybrid").scheduler.kv_cache_manager
    Shadow(manager.coordinator, manager.block_pool).longest_hit(HASHES, 0, 160, lambda _: True)
    assert manager.coordinator.block_pool is manager.block_pool
    pools = {id(each.block_pool) for each in manager.coordinator.single_type_managers}
    assert pools == {id(manager.block_pool)}
    assert manager.coordinator.find_longest_cache_hit(HASHES, 160)[1] == 0


@pytest.mark.parametrize(
    ("of_vllm", "skips", "expected"),
    [(0, False, 128), (32, False, 128), (64, False, 64), (160, False, 160), (0, True, 0)],
    ids=["none", "in the hit", "beyond it", "beyond ours", "reads no cache"],
)
def test_where_a_prompt_departs_from_what_is_in_vram_is_kept_first(
    of_vllm: int, skips: bool, expected: int
) -> None:
    """Others that run now begin so. vLLM keeps one such end."""
    request = SimpleNamespace(shared_prefix_boundary=of_vllm, skip_reading_prefix_cache=skips)
    shadow_of(64).keep_at(request, 32, 128)
    assert request.shared_prefix_boundary == expected
