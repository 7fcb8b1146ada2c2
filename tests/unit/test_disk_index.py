"""What is on disk, in which slot, and who leaves for room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from continuum_connector.messages import OnDisk
from continuum_connector.scheduler.kv_groups import Key, Numbers
from continuum_connector.scheduler.tiers.disk_index import DiskIndex
from tests.proofs import prove_disk
from tests.unit.chains import keys


def disk(num_slots: int) -> DiskIndex:
    index = DiskIndex()
    index.grow(num_slots)
    return index


def write(index: DiskIndex, program: str, chain: list[Key], first: int = 0) -> Numbers:
    """Write them at once; `first`: the place of the first in its chain."""
    numbers = index.reserve(program, chain, list(range(first, first + len(chain))))
    index.settle(numbers, written=True)
    prove_disk(index)
    return numbers


def has(index: DiskIndex, chain: list[Key]) -> list[bool]:
    return [bool(number >= 0) for number in index.find(chain)]


def test_a_block_is_found_only_once_its_write_has_settled() -> None:
    index = disk(4)
    numbers = index.reserve("p", keys("a", 3), [0, 1, 2])
    assert numbers.tolist() == [0, 1, 2]  # a chain's slots lie side by side
    assert keys("a", 1)[0] in index
    assert has(index, keys("a", 3)) == [False] * 3
    index.settle(numbers, written=True)
    assert has(index, keys("a", 4)) == [True, True, True, False]


def test_a_failed_write_frees_its_slots_unless_the_disk_failed_there() -> None:
    index = disk(4)
    index.settle(index.reserve("p", keys("a", 2), [0, 1]), written=False)
    assert (index.num_free, index.num_bad) == (4, 0)
    index.settle(index.reserve("p", keys("a", 2), [0, 1]), written=False, is_bad=True)
    assert (index.num_free, index.num_bad) == (2, 2)
    assert len(index.reserve("p", keys("a", 4), [0, 1, 2, 3])) == 2
    prove_disk(index)


def test_the_least_recently_used_program_leaves_first_and_its_deepest_first() -> None:
    index = disk(9)
    for name in "abc":
        write(index, name, keys(name, 3))
    index.shelves.use("a", index.find(keys("a", 3)))
    write(index, "d", keys("d", 2))
    assert has(index, keys("b", 3)) == [True, False, False]
    assert has(index, keys("a", 3)) == has(index, keys("c", 3)) == [True] * 3
    assert index.num_evicted == 2


def test_a_tail_that_was_written_first_leaves_first() -> None:
    index = disk(4)
    write(index, "a", keys("a", 4, start=2), first=2)
    write(index, "a", keys("a", 2))
    write(index, "b", keys("b", 3))
    assert has(index, keys("a", 4)) == [True, False, False, False]


def test_what_finished_programs_left_goes_first_then_what_was_found_then_what_was_used_least() -> (
    None
):
    index = disk(8)
    index.found([OnDisk(7, 1, 0, b"found")])
    write(index, "a", keys("a", 4))
    write(index, "b", keys("b", 2))
    index.demote("b", keys("b", 2))
    write(index, "c", keys("c", 2))
    assert has(index, keys("b", 2)) == [True, False]
    write(index, "c", keys("c", 3, start=2), first=2)
    assert has(index, keys("b", 2)) == [False, False]
    write(index, "c", keys("c", 4, start=3), first=3)
    assert (has(index, [b"found"]), has(index, keys("a", 4))) == ([False], [True] * 4)
    write(index, "c", keys("c", 5, start=4), first=4)
    assert has(index, keys("a", 4)) == [True, True, True, False]
    prove_disk(index)


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_said_to_outlast_others_does(is_used: bool) -> None:
    index = disk(12)
    write(index, "a", keys("a", 3))
    write(index, "b", keys("b", 4))
    assert index.outlasts("a", 5), "there is room"
    if is_used:
        index.shelves.use("a", index.find(keys("a", 3)))
    num = next(num for num in range(20) if not index.outlasts("a", num)) - 1
    assert num == (9 if is_used else 5)
    write(index, "c", keys("c", num))
    assert has(index, keys("a", 3)) == [True] * 3
    write(index, "d", keys("d", 1))
    assert has(index, keys("a", 3)) == [True, True, False]
    assert not index.outlasts("a", 1)
    assert not index.outlasts("nobody", 1)


def test_a_turn_takes_nothing_from_a_chain_that_it_does_not_continue() -> None:
    """Each chain of a program leaves by its own last use."""
    index = disk(8)
    write(index, "a", keys("a", 3))
    write(index, "b", keys("b", 2))
    write(index, "a", keys("x", 1), first=3)
    index.shelves.use("a", index.find(keys("a", 3)))
    index.shelves.use("b", index.find(keys("b", 2)))
    index.shelves.use("a", index.find(keys("x", 1)))
    write(index, "c", keys("c", 3))
    assert has(index, keys("a", 3)) == [True, True, False]
    write(index, "c", keys("c", 5, start=3), first=3)
    assert has(index, keys("a", 3)) == [False] * 3
    assert has(index, keys("b", 2)) == [True] * 2
    assert has(index, keys("x", 1)) == [True]


def test_what_several_programs_use_stays_until_all_of_them_are_done() -> None:
    """One-shots that share an agent's system prompt say that they are done, in whatever order."""
    index = disk(8)
    write(index, "old", keys("old", 2))
    shared = write(index, "agent", keys("s", 2))
    write(index, "agent", keys("a", 2), first=2)
    for name in ("one", "two", "agent", "three"):
        index.shelves.use(name, shared)
    for name in ("three", "one", "two"):
        index.demote(name, keys("s", 2))
        prove_disk(index)
    write(index, "new", keys("n", 4))
    assert has(index, keys("old", 2)) == [False] * 2
    assert has(index, keys("s", 2)) == has(index, keys("a", 2)) == [True] * 2
    write(index, "new", keys("m", 2))
    assert has(index, keys("a", 2)) == [False] * 2, "what the agent alone has was used before"
    index.demote("agent", keys("s", 2) + keys("a", 2))
    write(index, "new", keys("l", 2))
    assert has(index, keys("s", 2)) == [False] * 2
    assert has(index, keys("n", 4)) == [True] * 4


def test_of_chains_under_one_name_each_claims_what_it_uses() -> None:
    """Conversations under one id share a system prompt, and one of them says that it is done."""
    index = disk(8)
    write(index, "old", keys("old", 2))
    shared = write(index, "id", keys("s", 2))
    for name in ("a", "b"):
        index.shelves.use("id", shared)
        write(index, "id", keys(name, 2), first=2)
    index.shelves.use("id", np.concatenate([shared, index.find(keys("a", 2))]))
    index.demote("id", keys("s", 2) + keys("b", 2))
    write(index, "new", keys("n", 2))
    assert has(index, keys("b", 2)) == [False] * 2
    assert has(index, keys("s", 2)) == has(index, keys("a", 2)) == [True] * 2
    index.demote("id", keys("s", 2) + keys("a", 2))
    write(index, "new", keys("m", 4))
    assert has(index, keys("s", 2)) == has(index, keys("a", 2)) == [False] * 2
    assert has(index, keys("old", 2)) == [True] * 2


def test_a_claim_ends_with_what_the_slot_held() -> None:
    index = disk(2)
    write(index, "a", keys("a", 2))
    write(index, "b", keys("b", 2))  # in the same slots
    index.demote("b", keys("b", 2))
    write(index, "c", keys("c", 1))
    index.demote("a", keys("a", 2))
    prove_disk(index)
    write(index, "c", keys("c", 2, start=1), first=1)
    assert has(index, keys("c", 2)) == [True] * 2


def test_claims_are_bounded() -> None:
    index = disk(10)
    shared = write(index, "p", keys("s", 10))
    for number in range(200):
        index.shelves.use(f"p{number}", shared)
    prove_disk(index)
    assert len(index.shelves.claims.of) == 8


def test_what_is_read_is_nobody_elses_and_what_was_wrong_is_forgotten() -> None:
    index = disk(2)
    numbers = write(index, "a", keys("a", 2))
    index.acquire(numbers)
    assert len(index.reserve("b", keys("b", 1), [0])) == 0
    index.release(numbers[:1])
    index.release(numbers[1:], forget=True)
    assert has(index, keys("a", 2)) == [True, False]
    assert index.num_free == 1
    prove_disk(index)


def test_what_is_forgotten_under_a_copy_is_free_once_that_has_settled() -> None:
    index = disk(4)
    read = write(index, "a", keys("a", 2))
    index.acquire(read)
    written = index.reserve("b", keys("b", 2), [0, 1])
    index.clear()
    prove_disk(index)
    assert (index.num_free, index.num_ready) == (0, 0)
    index.settle(written, written=True)
    index.release(read)
    assert (index.num_free, index.num_ready) == (4, 0)
    assert not any(has(index, keys("a", 2) + keys("b", 2)))
    prove_disk(index)


def test_what_a_restart_found_counts_where_nobody_has_written_since() -> None:
    index = disk(4)
    write(index, "a", keys("a", 1))
    found = [OnDisk(0, 5, 0, b"old"), OnDisk(1, 6, 0, b"kept"), OnDisk(9, 7, 0, b"beyond")]
    assert index.found([*found, OnDisk(2, 8, 0, keys("a", 1)[0])]) == 1
    assert has(index, [b"old", b"kept", b"beyond"]) == [False, True, False]
    prove_disk(index)


def test_a_block_that_lies_on_disk_twice_is_found_once_as_it_was_written_last() -> None:
    """What leaves for room stays in its slot until somebody writes there; a restart finds it."""
    index = disk(4)
    assert index.found([OnDisk(0, 1, 0, b"k"), OnDisk(2, 5, 0, b"k"), OnDisk(2, 5, 0, b"k")]) == 1
    prove_disk(index)
    assert index.find([b"k"]).tolist() == [2]
    write(index, "p", keys("a", 4))
    assert has(index, [b"k"]) == [False]


def test_shelves_that_many_programs_took_from_are_tidied() -> None:
    index = disk(20)
    prefix = write(index, "p0", keys("a", 10))
    for number in range(1, 200):
        index.shelves.use(f"p{number}", prefix)
    assert sum(len(shelf.slots) for shelf in index.shelves.to_leave()) <= 40
    prove_disk(index)


class Disk(RuleBasedStateMachine):
    """Against a dict: what was written and not said to be gone is there under its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.index = disk(6)
        self.writing: list[Numbers] = []
        self.reading: list[Numbers] = []
        self.number = 0

    @rule(program=st.sampled_from("abc"), length=st.integers(1, 4))
    def reserve(self, program: str, length: int) -> None:
        self.number += 1
        chain = keys(f"k{self.number}.", length)
        numbers = self.index.reserve(program, chain, list(range(length)))
        busy = np.concatenate([numbers[:0], *self.writing, *self.reading])
        assert not set(numbers.tolist()) & set(busy.tolist())
        if len(numbers):
            self.writing.append(numbers)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), written=st.booleans())
    def settle(self, data: st.DataObject, written: bool) -> None:
        numbers = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.index.settle(numbers, written)

    @rule(data=st.data(), program=st.sampled_from("abc"))
    def read(self, data: st.DataObject, program: str) -> None:
        ready = self.index.find(list(self.index._numbers))
        ready = ready[ready >= 0]
        if len(ready):
            numbers = ready[: data.draw(st.integers(1, len(ready)))]
            self.index.shelves.use(program, numbers)
            self.index.acquire(numbers)
            self.reading.append(numbers)

    @precondition(lambda self: self.reading)
    @rule(forget=st.booleans())
    def release(self, forget: bool) -> None:
        self.index.release(self.reading.pop(), forget)

    @rule(program=st.sampled_from("abc"))
    def demote(self, program: str) -> None:
        self.index.demote(program, list(self.index._numbers))

    @rule(dice=st.integers(0, 9))
    def clear(self, dice: int) -> None:
        if not dice:
            self.index.clear()

    @invariant()
    def books_close(self) -> None:
        prove_disk(self.index)


Disk.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestDisk = Disk.TestCase
