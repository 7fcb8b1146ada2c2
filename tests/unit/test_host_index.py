"""Which blocks are in DRAM, who keeps them there, and who leaves first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from continuum_connector.errors import InvariantError
from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import NO_TICKETS, Tickets
from tests.proofs import num_orphans_read, prove_dram
from tests.unit.chains import NOW, by_program, demote, keys, numbers, ready, store, touch


def test_a_block_is_found_only_once_its_store_has_settled() -> None:
    index = HostIndex(4)
    slots = index.reserve(keys("a", 3), "p", NOW)
    assert len(slots) == index.num_writing == 3
    assert keys("a", 1)[0] in index
    assert not any(index.is_ready(key) for key in keys("a", 3))
    assert len(index.find(keys("a", 3))) == 0
    with pytest.raises(InvariantError, match="expected READY"):
        index.acquire(slots)
    index.settle(slots, stored=True)
    assert all(index.is_ready(key) for key in keys("a", 3))
    with pytest.raises(InvariantError, match="expected WRITING"):
        index.settle(slots, stored=True)


def test_a_failed_store_frees_its_slots() -> None:
    index = HostIndex(4)
    index.settle(index.reserve(keys("a", 3), "p", NOW), stored=False)
    assert (index.num_free, index.num_ready, index.num_writing) == (4, 0, 0)
    assert keys("a", 1)[0] not in index
    prove_dram(index)


def test_only_what_is_not_there_is_claimed() -> None:
    index = HostIndex(9)
    store(index, "p", keys("a", 3))
    assert index.keys_of(index.reserve(keys("a", 5), "p", NOW)) == keys("a", 5, start=3)


def test_what_a_programs_newest_chain_has_is_not_looked_up_again() -> None:
    index = HostIndex(9)
    store(index, "p", keys("a", 4))

    def says(names: list[Key]) -> list[int]:
        """Whether it is asked of the program or not, the answer is the same."""
        found = index.slots_of(names, "p").tolist()
        assert found == index.slots_of(names).tolist()
        return found

    assert -1 not in says(keys("a", 4))
    assert says(keys("a", 6))[4:] == [-1, -1]
    assert says(keys("a", 3)) == says(keys("a", 4))[:3]
    assert says(keys("b", 6)) == [-1] * 6
    assert -1 not in says(keys("a", 2))
    index.release(index.acquire(index.find(keys("a", 2))[1:]), corrupt=True)  # one within it
    assert says(keys("a", 5)).count(-1) == 2
    store(index, "q", keys("b", 6))  # takes the slot that was lost
    assert says(keys("a", 5))[1] == -1


def test_a_chain_that_does_not_fit_keeps_its_head() -> None:
    index = HostIndex(4)
    assert index.keys_of(store(index, "p", keys("a", 9))) == keys("a", 4)
    assert len(store(index, "p", keys("a", 9))) == 0


def test_the_least_recently_used_program_goes_first_and_its_tail_first() -> None:
    index = HostIndex(9)
    for name in "abc":
        store(index, name, keys(name, 3))
    touch(index, "a", NOW)
    store(index, "d", keys("d", 2))
    assert [ready(index, keys(name, 3)) for name in "abcd"] == [3, 1, 3, 2]
    assert list(index.gone) == keys("b", 3, start=1)[::-1]
    store(index, "d", keys("d", 4))
    assert [ready(index, keys(name, 3)) for name in "abc"] == [3, 0, 2]


def test_slots_that_come_later_are_used_last_and_nothing_leaves_before() -> None:
    index = HostIndex(0)
    assert len(index.reserve(keys("a", 2), "p", NOW)) == 0
    index.grow(3)
    assert numbers(store(index, "p", keys("a", 2))) == [0, 1]
    index.grow(6)
    index.grow(2)  # the others are away
    prove_dram(index)
    worth = {"p": 1.0, "q": 0.0}
    assert not len(index.reserve(keys("b", 4), "q", NOW, by_program(worth.__getitem__)))
    assert index.num_free == 4
    index.grow(6)
    assert numbers(store(index, "q", keys("b", 4))) == [2, 3, 4, 5]
    assert (index.num_slots, index.num_free, index.num_evicted) == (6, 0, 0)
    assert ready(index, keys("a", 2)) == 2


def test_how_long_blocks_stay_is_forgotten_when_there_is_more_room() -> None:
    index = HostIndex(2)
    store(index, "p", keys("a", 2))
    store(index, "q", keys("b", 2), now=NOW + 1)
    assert index.residence.seconds(NOW + 1) < float("inf")
    index.grow(100)
    assert index.residence.seconds(NOW + 1) == float("inf")


def test_only_what_leaves_for_room_is_evicted() -> None:
    index = HostIndex(4)
    index.settle(index.reserve(keys("a", 2), "p", NOW), stored=False)
    store(index, "p", keys("b", 4))
    index.release(index.acquire(index.find(keys("b", 1))), corrupt=True)
    assert (len(index.gone), index.num_evicted) == (3, 0)
    store(index, "q", keys("c", 3))
    assert index.num_evicted == 2
    assert len(index.gone) == 3 + 2
    index.clear()
    assert index.num_evicted == 2
    assert len(index.gone) == 3 + 2
    index.past.tidy()
    assert len(index.gone) == 3 + 2 + 4


def test_a_finished_programs_blocks_go_first() -> None:
    index = HostIndex(9)
    for name in "abc":
        store(index, name, keys(name, 3))
    demote(index, "c")
    store(index, "d", keys("d", 2))
    assert [ready(index, keys(name, 3)) for name in "abcd"] == [3, 3, 1, 2]


def test_a_chain_never_evicts_itself() -> None:
    index = HostIndex(6)
    store(index, "a", keys("a", 4))
    assert len(store(index, "a", keys("a", 9))) == 2
    assert ready(index, keys("a", 9)) == 6


def test_a_shared_prefix_belongs_to_its_latest_user() -> None:
    index = HostIndex(8)
    system = keys("system", 2)
    store(index, "a", system + keys("a", 2))
    store(index, "b", system + keys("b", 2))
    store(index, "c", keys("c", 4))  # takes what is a's alone
    assert (ready(index, system + keys("a", 2)), ready(index, system + keys("b", 2))) == (2, 4)


def test_a_shared_prefix_is_adopted_before_anything_is_evicted() -> None:
    index = HostIndex(4)
    system = keys("system", 2)
    store(index, "a", system + keys("a", 2))
    assert index.keys_of(store(index, "b", [*keys("b", 1), *system])) == keys("b", 1)
    assert list(index.gone) == keys("a", 2, start=1)


def test_a_superseded_chain_goes_before_the_one_that_took_its_place() -> None:
    index = HostIndex(8)
    store(index, "a", keys("x", 1) + keys("old", 3))
    store(index, "a", keys("x", 1) + keys("new", 3))
    store(index, "b", keys("b", 3))
    assert ready(index, keys("x", 1) + keys("new", 3)) == 4
    assert ready(index, keys("x", 1) + keys("old", 3)) == 2


def test_a_program_alone_replaces_its_superseded_chain() -> None:
    index = HostIndex(5)
    store(index, "a", keys("x", 1) + keys("old", 4))
    assert len(store(index, "a", keys("x", 1) + keys("new", 9))) == 4
    assert ready(index, keys("x", 1) + keys("new", 9)) == 5


def test_what_is_read_or_written_is_not_evicted() -> None:
    index = HostIndex(4)
    store(index, "a", keys("a", 2))
    index.reserve(keys("b", 2), "b", NOW)
    slots = index.acquire(index.find(keys("a", 1)))
    assert len(index.reserve(keys("c", 4), "c", NOW)) == 1  # a1 was free to go
    index.release(slots)
    assert len(index.reserve(keys("c", 4), "c", NOW)) == 1
    prove_dram(index)


def test_a_slot_forgotten_under_its_readers_is_free_after_the_last() -> None:
    index = HostIndex(2)
    store(index, "a", keys("a", 1))
    first, second = index.acquire(index.find(keys("a", 1))), index.acquire(index.find(keys("a", 1)))
    index.release(first, corrupt=True)
    assert keys("a", 1)[0] not in index
    assert (num_orphans_read(index), index.num_free) == (1, 1)
    again = index.reserve(keys("a", 1), "a", NOW)  # a new place while the old one is still read
    assert numbers(again) != numbers(second)
    index.release(second, corrupt=True)
    assert (num_orphans_read(index), index.num_free) == (0, 1)
    prove_dram(index)


def test_clear_forgets_all_and_busy_slots_are_free_when_they_are_done() -> None:
    index = HostIndex(6)
    store(index, "a", keys("a", 3))
    readers = index.acquire(index.find(keys("a", 2)))
    writers = index.reserve(keys("b", 2), "b", NOW)
    index.clear()
    prove_dram(index)
    assert (index.num_free, index.num_ready) == (2, 0)
    index.settle(writers, stored=True)
    index.release(readers)
    prove_dram(index)
    assert (index.num_free, index.num_ready) == (6, 0)
    assert not any(key in index for key in keys("a", 3) + keys("b", 2))


def test_the_version_grows_whenever_a_lookup_may_answer_differently() -> None:
    index = HostIndex(2)
    versions = [index.version]
    store(index, "a", keys("a", 2))
    versions.append(index.version)
    index.release(index.acquire(index.find(keys("a", 1))), corrupt=True)
    versions.append(index.version)
    index.reserve(keys("b", 2), "b", NOW)  # evicts
    versions.append(index.version)
    index.clear()
    versions.append(index.version)
    assert versions == sorted(set(versions))


class IndexMachine(RuleBasedStateMachine):
    """Against a model: a dict of what was stored and neither evicted nor forgotten since."""

    @initialize(num_slots=st.integers(0, 12))
    def start(self, num_slots: int) -> None:
        self.index = HostIndex(num_slots)
        self.writing: list[Tickets] = []
        self.reading: list[Tickets] = []
        self.stored: dict[Key, None] = {}

    @rule(
        program=st.sampled_from("abc"),
        cut=st.integers(0, 4),
        end=st.integers(0, 6),
        worth=st.none() | st.fixed_dictionaries({each: st.integers(0, 2) for each in "abc"}),
        num_prompt=st.integers(0, 4),
    )
    def reserve(
        self, program: str, cut: int, end: int, worth: dict[str, int] | None, num_prompt: int
    ) -> None:
        chain = keys("s", cut) + keys(program, end)
        before = {key for key in self.stored if self.index.is_ready(key)}
        rank = None if worth is None else by_program(worth.__getitem__)
        refused = self.index.num_refused + sum(key not in self.index for key in chain)
        slots = self.index.reserve(chain, program, NOW, rank, num_prompt)
        assert self.index.num_refused == refused - len(slots)
        assert not before & set(self.index.keys_of(slots))
        assert before & set(chain) <= {key for key in chain if self.index.is_ready(key)}
        self.writing.append(slots)

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 9), stored=st.booleans())
    def settle(self, which: int, stored: bool) -> None:
        slots = self.writing.pop(which % len(self.writing))
        self.stored |= dict.fromkeys(self.index.keys_of(slots) if stored else ())
        self.index.settle(slots, stored)

    @rule(which=st.integers(0, 9))
    def acquire(self, which: int) -> None:
        found = [key for key in self.stored if self.index.is_ready(key)][: which + 1]
        slots = [self.index.find([key]) for key in found]
        self.reading.append(self.index.acquire(np.concatenate([NO_TICKETS, *slots])))

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 9), corrupt=st.booleans())
    def release(self, which: int, corrupt: bool) -> None:
        self.index.release(self.reading.pop(which % len(self.reading)), corrupt)

    @rule(num_slots=st.integers(0, 16))
    def grow(self, num_slots: int) -> None:
        self.index.grow(num_slots)

    @rule(program=st.sampled_from("abcz"), last=st.booleans())
    def use(self, program: str, last: bool) -> None:
        if last:
            demote(self.index, program)
        else:
            touch(self.index, program, NOW)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.stored.clear()

    @rule()
    def tidy(self) -> None:
        self.index.past.tidy()

    @invariant()
    def slots_are_where_they_were_stored_and_busy_ones_are_nobody_elses(self) -> None:
        prove_dram(self.index)
        for key in self.index.gone:
            self.stored.pop(key, None)
        self.index.gone.clear()
        assert {key for key in self.stored if self.index.is_ready(key)} == set(self.stored)
        busy = [set(numbers(slots)) for slots in self.writing]
        busy.append({number for slots in self.reading for number in numbers(slots)})
        assert sum(map(len, busy)) == len(set().union(*busy))

    def teardown(self) -> None:
        for slots in self.writing:
            self.index.settle(slots, stored=False)
        for slots in self.reading:
            self.index.release(slots)
        self.index.clear()
        prove_dram(self.index)
        assert self.index.num_free == self.index.num_slots


IndexMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=8))
@settings(max_examples=30)
def test_what_is_stored_of_a_chain_is_its_head(turns: list[tuple[str, int]]) -> None:
    index = HostIndex(7)
    for program, length in turns:
        store(index, program, keys(program, length))
        for each in "abc":
            ready(index, keys(each, 6))
