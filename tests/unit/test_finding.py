"""What DRAM has of a waiting prompt, asked in every step: right, and without walking it again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.kv_groups import Key, KvGroup, KvGroups
from continuum_connector.scheduler.tiers import finding
from continuum_connector.scheduler.tiers.finding import Finder
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Tickets
from tests.unit.chains import NOW, keys, numbers, store

BLOCK = 16
FULL = KvGroups([KvGroup(0, BLOCK)], BLOCK)
TWO_FULL = KvGroups([KvGroup(0, BLOCK), KvGroup(1, BLOCK)], BLOCK)
WINDOWED = KvGroups([KvGroup(0, BLOCK), KvGroup(1, BLOCK, window=2 * BLOCK)], BLOCK)


class Asked(HostIndex):
    """Counts the keys that are looked up."""

    num_keys = 0

    def find(self, keys: Sequence[Key]) -> Tickets:
        self.num_keys += len(keys)
        return super().find(keys)


def prompt(name: str, length: int, request_id: str = "r") -> Any:
    hashes = [f"{name}{i}".encode() for i in range(length)]
    num_tokens = length * BLOCK + 1
    return SimpleNamespace(request_id=request_id, num_tokens=num_tokens, block_hashes=hashes)


def test_stores_of_others_do_not_make_it_walk_the_prompt_again() -> None:
    index = Asked(10_000)
    finder, request = Finder(index, FULL), prompt("a", 8192)
    store(index, "a", keys("a", 8192))
    assert finder.find(request, 0) == 8192 * BLOCK
    index.num_keys = 0
    for number in range(50):
        store(index, f"p{number}", keys(f"p{number}.", 2))
        assert finder.find(request, 0) == 8192 * BLOCK
    assert index.num_keys == 0


def test_what_comes_later_is_looked_for_where_the_last_look_ended() -> None:
    index = Asked(10_000)
    finder, request = Finder(index, FULL), prompt("a", 8192)
    for length in range(4096, 8192, 512):
        store(index, "a", keys("a", length))
        assert finder.find(request, 0) == length * BLOCK
        assert finder.find(request, 0) == length * BLOCK
    assert index.num_keys < 2 * 8192 + 8 * 1024
    looked_up, index.num_keys = index.num_keys, 0
    store(index, "b", keys("b", 1))
    finder.find(request, 0)
    assert 0 < index.num_keys <= 16 < looked_up


def test_only_what_left_of_those_found_is_looked_for_again() -> None:
    index = Asked(4100)
    finder, request = Finder(index, FULL), prompt("a", 4096)
    store(index, "a", keys("a", 4096))
    store(index, "b", keys("b", 4))
    finder.find(request, 0)
    index.num_keys = 0
    store(index, "c", keys("c", 4), rank=lambda program: program != "b")  # b's leave
    assert finder.find(request, 0) == 4096 * BLOCK
    assert index.num_keys == 0
    store(index, "d", keys("d", 3), rank=lambda program: program != "a")  # the tail of a's
    assert finder.find(request, 0) == 4093 * BLOCK
    assert index.num_keys <= 16


def test_a_hole_ends_the_hit_and_is_closed_when_the_block_is_back() -> None:
    index = HostIndex(100)
    finder, request = Finder(index, FULL), prompt("a", 40)
    store(index, "a", keys("a", 40))
    finder.find(request, 0)
    index.release(index.acquire(index.find(keys("a", 8, start=7))), corrupt=True)
    assert finder.find(request, 0) == 7 * BLOCK
    store(index, "a", keys("a", 40))
    assert finder.find(request, 0) == 40 * BLOCK


def test_a_slot_that_is_another_blocks_by_now_is_not_taken_for_the_one_found() -> None:
    index = HostIndex(4)
    finder, request = Finder(index, FULL), prompt("a", 4)
    store(index, "a", keys("a", 4))
    assert finder.find(request, 0) == 4 * BLOCK
    store(index, "b", keys("b", 1))  # in the slot of the last
    blocks, slots = finder.take(request, [[11, 12, 13, 14]], 4 * BLOCK)
    assert (blocks.tolist(), slots) == ([11, 12, 13, 14], None)


def test_a_load_of_less_than_was_found_takes_the_first_of_it() -> None:
    index = HostIndex(8)
    finder, request = Finder(index, TWO_FULL), prompt("a", 4)
    both = [key for i in range(4) for g in (0, 1) for key in keys("a", i + 1, start=i, group=g)]
    stored = store(index, "a", both)
    assert finder.find(request, BLOCK) == 3 * BLOCK
    blocks, slots = finder.take(request, [[0, 11, 12, 13], [0, 21, 22, 23]], 2 * BLOCK)
    assert blocks.tolist() == [11, 21, 12, 22]
    assert slots is not None
    assert numbers(slots) == numbers(stored)[2:6]
    assert list(finder) == []


def test_a_promise_outlives_what_is_remembered_for_it() -> None:
    index = HostIndex(8)
    finder, request = Finder(index, FULL), prompt("a", 4)
    store(index, "a", keys("a", 4))
    finder.find(request, 0)
    for number in range(finding.MAX_REMEMBERED):
        finder.find(prompt("a", 2, f"other{number}"), 0)
    assert len(finder._tickets) == finding.MAX_REMEMBERED
    assert "r" not in finder._tickets
    _, slots = finder.take(request, [[11, 12, 13, 14]], 4 * BLOCK)
    assert slots is not None
    assert numbers(slots) == numbers(index.find(keys("a", 4)))


@pytest.mark.parametrize("groups", [FULL, TWO_FULL, WINDOWED], ids=["full", "two", "windowed"])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "other", "corrupt", "clear", "find", "find"]),
            st.integers(0, 9),
            st.integers(0, 3),
        ),
        max_size=25,
    )
)
@settings(max_examples=60, deadline=None)
def test_it_answers_as_if_it_had_looked_anew(
    groups: KvGroups, steps: list[tuple[str, int, int]]
) -> None:
    index = HostIndex(14)
    finder, request = Finder(index, groups), prompt("a", 9)

    def chain(name: str, length: int) -> list[Key]:
        return [
            key
            for i in range(length)
            for group in groups
            for key in keys(name, i + 1, start=i, group=group.index)
        ]

    for what, number, start in steps:
        if what == "store":
            store(index, "a", chain("a", number))
        elif what == "other":
            store(index, f"p{start}", chain(f"p{start}.", number // 2))
        elif what == "corrupt":
            slots = index.find(keys("a", number + 1, start=number))
            index.release(index.acquire(slots), corrupt=True)
        elif what == "clear" and number == 0:
            index.clear()
        in_vram = start * BLOCK
        hit = groups.longest_hit(request.block_hashes, in_vram, 9 * BLOCK, index.is_ready)
        assert finder.find(request, in_vram) == hit - in_vram


def test_no_object_is_made_per_block() -> None:
    """10^6 of them, and every full collection would stop the engine to look at each."""
    index = HostIndex(20_000)
    finder, request = Finder(index, FULL), prompt("a", 10_000)
    chain, block_ids = keys("a", 10_000), [list(range(10_000))]
    gc.collect()
    before = len(gc.get_objects())
    slots = index.reserve(chain, "a", NOW)
    index.settle(slots, stored=True)
    finder.find(request, 0)
    _, taken = finder.take(request, block_ids, 10_000 * BLOCK)
    assert taken is not None
    index.acquire(taken)
    assert len(gc.get_objects()) - before < 100
    assert np.array_equal(taken, slots)
