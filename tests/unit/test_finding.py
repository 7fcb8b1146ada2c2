"""What DRAM has of a waiting prompt, asked in every step: right, and without walking it again."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.kv_groups import STATE, WINDOW, Key, KvGroup, KvGroups, block_key
from continuum_connector.scheduler.tiers import dram
from continuum_connector.scheduler.tiers.dram import Finder
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Tickets
from tests.unit.chains import NOW, keys, numbers, store

BLOCK = 16
WIDE = 4 * BLOCK  # a block of the full group where sizes differ


class Spelled:
    """A Lookup: every end is tried, from the longest hit down. `kept`: how much of what lies
    before a hit each group reads, in tokens; None for all, and a state is what it reads last."""

    def __init__(self, groups: KvGroups, kept: Sequence[int | None]) -> None:
        self._groups = groups
        self._kept = kept
        self.num_looks = 0
        self.num_unread = 0  # tokens that a load gets blocks for, and no hit needs

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, limit: int, has: Callable[[Key], bool]
    ) -> tuple[int, int]:
        self.num_looks += 1
        unit, size = self._groups.hash_size, self._groups.scheduler_size
        limit = min(limit, len(hashes) * unit)

        def is_there(group: KvGroup, end: int) -> bool:
            return end <= start or has(block_key(hashes[end // unit - 1], group.index))

        def longest(groups: Sequence[KvGroup]) -> int:
            for hit in range(limit // size * size, start, -size):
                reads = ((group, self._first(group.index, hit)) for group in groups)
                if all(
                    is_there(group, end)
                    for group, first in reads
                    for end in range(hit, first, -group.block_size)
                ):
                    return hit
            return start

        groups = list(self._groups)
        return longest(groups), longest([each for each in groups if each.kind == "full"])

    def keep_at(self, request: Any, hit: int, end: int) -> None:
        request.shared_prefix_boundary = end

    def first_read(self, group: int, hit: int) -> int:
        return max(0, self._first(group, hit) - self.num_unread * group)

    def _first(self, group: int, hit: int) -> int:
        kept = self._kept[group]
        return 0 if kept is None else max(0, hit - kept)


def asking(*groups: KvGroup, kept: Sequence[int | None]) -> KvGroups:
    which = KvGroups(groups, BLOCK)
    return which.asking(None, Spelled(which, kept))


def looked(groups: KvGroups) -> Spelled:
    assert isinstance(groups.lookup, Spelled)
    return groups.lookup


FULL = KvGroups([KvGroup(0, BLOCK)], BLOCK)
TWO_FULL = asking(KvGroup(0, BLOCK), KvGroup(1, BLOCK), kept=(None, None))
WINDOWED = asking(KvGroup(0, BLOCK), KvGroup(1, BLOCK, WINDOW, 2 * BLOCK), kept=(None, 2 * BLOCK))
STATES = asking(KvGroup(0, BLOCK), KvGroup(1, BLOCK, STATE), kept=(None, 1))
MIXED = asking(KvGroup(0, WIDE), KvGroup(1, BLOCK, WINDOW, 2 * BLOCK), kept=(None, 2 * BLOCK))


class Asked(HostIndex):
    """Counts the keys that are looked up."""

    num_keys = 0

    def find(self, keys: Sequence[Key]) -> Tickets:
        self.num_keys += len(keys)
        return super().find(keys)

    def __contains__(self, key: Key) -> bool:
        self.num_keys += 1
        return super().__contains__(key)


def prompt(name: str, length: int, request_id: str = "r") -> Any:
    hashes = [f"{name}{i}".encode() for i in range(length)]
    num_tokens = length * BLOCK + 1
    return SimpleNamespace(request_id=request_id, num_tokens=num_tokens, block_hashes=hashes)


def chain(groups: KvGroups, name: str, length: int) -> list[Key]:
    """Every block of so many hashes, head first over all groups."""
    return [
        block_key(f"{name}{end - 1}".encode(), group.index)
        for end in range(1, length + 1)
        for group in groups
        if end * BLOCK % group.block_size == 0
    ]


def settle(finder: Finder, index: HostIndex, program: str, blocks: Sequence[Key]) -> Tickets:
    """Store what is not there yet, and say so, as DramTier does."""
    new = [key for key in blocks if key not in index]
    slots = store(index, program, blocks)
    if len(slots):
        finder.came((_number(new[0]) + 1) * BLOCK, new[0])
    return slots


def _number(key: Key) -> int:
    """The place of a block in its chain, which the names of these keys end with."""
    return int(re.findall(rb"[0-9]+$", key[:-4])[0])


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
    stored = settle(finder, index, "a", chain(TWO_FULL, "a", 4))
    assert finder.find(request, BLOCK) == 3 * BLOCK
    blocks, slots = finder.take(request, [[0, 11, 12, 13], [0, 21, 22, 23]], 2 * BLOCK)
    assert blocks.tolist() == [11, 12, 21, 22]
    assert slots is not None
    assert numbers(slots) == [numbers(stored)[place] for place in (2, 4, 3, 5)]
    assert list(finder) == []


def test_a_promise_outlives_what_is_remembered_for_it() -> None:
    index = HostIndex(8)
    finder, request = Finder(index, FULL), prompt("a", 4)
    store(index, "a", keys("a", 4))
    finder.find(request, 0)
    for number in range(dram.MAX_REMEMBERED):
        finder.find(prompt("a", 2, f"other{number}"), 0)
    assert len(finder._tickets) == dram.MAX_REMEMBERED
    assert "r" not in finder._tickets
    _, slots = finder.take(request, [[11, 12, 13, 14]], 4 * BLOCK)
    assert slots is not None
    assert numbers(slots) == numbers(index.find(keys("a", 4)))


ALL = {"full": FULL, "two": TWO_FULL, "windowed": WINDOWED, "states": STATES, "mixed": MIXED}


@pytest.mark.parametrize("groups", ALL.values(), ids=ALL)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "other", "corrupt", "clear", "find", "find"]),
            st.integers(0, 9),
            st.integers(0, 1),
        ),
        max_size=25,
    )
)
@settings(max_examples=60)
def test_it_answers_as_if_it_had_looked_anew(
    groups: KvGroups, steps: list[tuple[str, int, int]]
) -> None:
    index = HostIndex(14)
    finder, request = Finder(index, groups), prompt("a", 9)
    rule = groups.lookup or Spelled(groups, (None,))
    for what, number, start in steps:
        if what == "store":
            settle(finder, index, "a", chain(groups, "a", number))
        elif what == "other":
            settle(finder, index, f"p{start}", chain(groups, f"p{start}.", number // 2))
        elif what == "corrupt":
            slots = index.find(keys("a", number + 1, start=number, group=start))
            index.release(index.acquire(slots), corrupt=True)
        elif what == "clear" and number == 0:
            index.clear()
        in_vram = start * groups.scheduler_size
        hit, full = rule.longest_hit(request.block_hashes, in_vram, 9 * BLOCK, index.is_ready)
        assert finder.find(request, in_vram) == hit - in_vram
        request.shared_prefix_boundary = 0  # as vLLM has it, with each lookup of its own
        assert Finder(index, groups).find(request, in_vram) == hit - in_vram
        assert request.shared_prefix_boundary == (full if full > hit else 0)


@pytest.mark.parametrize("groups", [WINDOWED, STATES, MIXED], ids=["windowed", "states", "mixed"])
def test_stores_of_others_do_not_make_it_look_anew(groups: KvGroups) -> None:
    index, waiting = HostIndex(10_000), [prompt("a", 512, f"r{i}") for i in range(20)]
    finder, lookup = Finder(index, groups), looked(groups)
    settle(finder, index, "a", chain(groups, "a", 512))
    assert {finder.find(each, 0) for each in waiting} == {512 * BLOCK}
    lookup.num_looks = 0
    for number in range(50):
        settle(finder, index, f"p{number}", chain(groups, f"p{number}.", 8))
        assert {finder.find(each, 0) for each in waiting} == {512 * BLOCK}
    assert lookup.num_looks == 0
    settle(finder, index, "a", chain(groups, "a", 520))  # none of it is of these prompts
    assert {finder.find(each, 0) for each in waiting} == {512 * BLOCK}
    assert lookup.num_looks == 0


def test_what_settled_unseen_by_a_turn_makes_it_look_anew() -> None:
    index, request = HostIndex(10_000), prompt("a", 8)
    finder = Finder(index, STATES)
    assert finder.find(request, 0) == 0
    settle(finder, index, "a", chain(STATES, "a", 8))
    for number in range(dram.MAX_ARRIVALS):
        settle(finder, index, f"p{number}", chain(STATES, f"p{number}.", 1))
    assert finder.find(request, 0) == 8 * BLOCK


def test_a_load_ends_exactly_at_a_state() -> None:
    index, request = HostIndex(100), prompt("a", 8)
    finder = Finder(index, STATES)
    full = [key for key in chain(STATES, "a", 8) if key.endswith(block_key(b"", 0))]
    states = keys("a", 3, start=2, group=1) + keys("a", 6, start=5, group=1)
    stored = store(index, "a", [*full, *states])
    assert finder.find(request, 2 * BLOCK) == 4 * BLOCK
    table = [[1, 2, 11, 12, 13, 14, 15], [0, 9, 0, 0, 0, 21, 22]]  # 9 is VRAM's own
    blocks, slots = finder.take(request, table, 4 * BLOCK)
    assert blocks.tolist() == [11, 12, 13, 14, 21]
    assert slots is not None
    assert numbers(slots) == numbers(stored)[2:6] + numbers(stored)[-1:]


def test_a_hit_is_as_long_as_the_load_of_it_finds_all_that_it_gets_blocks_for() -> None:
    """As where vLLM retains more of a window than attention reads."""
    groups = asking(KvGroup(0, BLOCK), KvGroup(1, BLOCK, STATE), kept=(None, 1))
    index, request = HostIndex(100), prompt("a", 8)
    finder = Finder(index, groups)
    full = [key for key in chain(groups, "a", 8) if key.endswith(block_key(b"", 0))]
    store(index, "a", full + keys("a", 6, start=2, group=1))
    looked(groups).num_unread = BLOCK
    assert finder.find(request, 0) == 6 * BLOCK
    finder = Finder(index, groups)
    looked(groups).num_unread = 3 * BLOCK
    assert finder.find(request, 0) == 6 * BLOCK
    finder = Finder(index, groups)
    looked(groups).num_unread = 4 * BLOCK
    assert finder.find(request, 0) == 0


def test_a_promise_that_vllm_cuts_to_where_no_state_is_is_not_made_again() -> None:
    index, request = HostIndex(100), prompt("a", 8)
    finder = Finder(index, STATES)
    full = [key for key in chain(STATES, "a", 8) if key.endswith(block_key(b"", 0))]
    store(index, "a", full + keys("a", 8, start=7, group=1))
    assert finder.find(request, 0) == 8 * BLOCK
    _, slots = finder.take(request, [[*range(1, 8)], [0] * 6 + [21]], 7 * BLOCK)
    assert slots is None
    assert finder.find(request, 0) == 0
    finder.forget("r")
    assert finder.find(request, 0) == 8 * BLOCK


def test_a_block_larger_than_a_hash_is_named_by_the_hash_at_its_end() -> None:
    index, request = HostIndex(100), prompt("a", 9)
    finder = Finder(index, MIXED)
    stored = settle(finder, index, "a", chain(MIXED, "a", 9))
    assert finder.find(request, WIDE) == WIDE
    table = [[5, 11], [0] * 6 + [21, 22]]
    blocks, slots = finder.take(request, table, WIDE)
    assert blocks.tolist() == [11, 21, 22]
    assert slots is not None
    named = dict(zip(index.keys_of(stored), numbers(stored), strict=True))
    wanted = keys("a", 8, start=7) + keys("a", 8, start=6, group=1)
    assert numbers(slots) == [named[key] for key in wanted]


class Amid:
    """A Lookup whose hits end amid a block, as with --prefix-match-unit."""

    def __init__(self, hit: int) -> None:
        self.hit = hit

    def longest_hit(
        self, hashes: Sequence[bytes], start: int, limit: int, has: Callable[[Key], bool]
    ) -> tuple[int, int]:
        return (max(start, min(self.hit, limit)),) * 2

    def keep_at(self, request: Any, hit: int, end: int) -> None:
        """Ends of full attention alone are no matter here."""

    def first_read(self, group: int, hit: int) -> int:
        return (hit - 1) * group


@pytest.mark.parametrize("filled", [7, 8])
def test_a_block_that_a_hit_ends_amid_may_have_been_filled_since_but_a_state_may_not(
    filled: int,
) -> None:
    groups = KvGroups([KvGroup(0, WIDE), KvGroup(1, WIDE, STATE)], BLOCK, None, Amid(6 * BLOCK))
    index, request = HostIndex(100), prompt("a", 9)
    finder = Finder(index, groups)
    tail = keys("a", filled, start=filled - 1)
    stored = store(index, "a", [*keys("a", 4, start=3), *tail])
    later = store(index, "a", keys("a", filled, start=filled - 1, group=1))
    assert finder.find(request, 0) == 0  # another state than that after the hit's last token
    state = store(index, "a", keys("a", 6, start=5, group=1))
    finder.came(6 * BLOCK, keys("a", 6, start=5, group=1)[0])
    assert finder.find(request, 0) == 6 * BLOCK
    blocks, slots = finder.take(request, [[11, 12], [0, 22]], 6 * BLOCK)
    assert blocks.tolist() == [11, 12, 22]
    assert slots is not None
    assert numbers(slots) == numbers(stored) + numbers(state)
    assert len(later) == 1


def test_the_store_of_such_a_block_is_heard_of() -> None:
    groups = KvGroups([KvGroup(0, WIDE), KvGroup(1, WIDE, STATE)], BLOCK, None, Amid(6 * BLOCK))
    index, request = HostIndex(100), prompt("a", 9)
    finder = Finder(index, groups)
    store(index, "a", keys("a", 4, start=3) + keys("a", 6, start=5, group=1))
    assert finder.find(request, 0) == 0
    store(index, "a", keys("a", 8, start=7))
    finder.came(6 * BLOCK, keys("a", 8, start=7)[0])  # it was kept as one that ends amid
    assert finder.find(request, 0) == 6 * BLOCK


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
