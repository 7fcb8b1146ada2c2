"""Who of DRAM is written to the disk next, and how many bytes may be."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers.base import NothingBelow
from continuum_connector.scheduler.tiers.disk_index import DiskIndex, Marks
from continuum_connector.scheduler.tiers.disk_saving import (
    DAY_S,
    LEAST_DEPTH,
    MOST_DEPTH,
    RETRY_S,
    Attempts,
    Batch,
    Budget,
    Depth,
    Saving,
)
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import NO_TICKETS, numbers_of
from tests.proofs import prove_dram
from tests.unit.chains import NOW, demote, keys

MANY = 100


class OnlyMarks(NothingBelow):
    """What the disk notes of DRAM's slots, and nothing else of it."""

    def __init__(self, index: HostIndex) -> None:
        self.marks = Marks(index.keys_at)
        self.grow, self.came, self.used = self.marks.grow, self.marks.came, self.marks.used
        self.left = self.marks.left


class Rig:
    """A DRAM, a disk and what saves the one to the other; writes settle at once."""

    def __init__(
        self,
        num_slots: int,
        slot_blocks: int = 1,
        bytes_per_day: int = 0,
        least_bytes: int = 1,
        num_on_disk: int = 100 * MANY,  # nothing ever has to leave it
    ) -> None:
        self.disk, self.account = DiskIndex(), Account()
        self.dram = HostIndex(num_slots, below=OnlyMarks)
        assert isinstance(self.dram.below, OnlyMarks)
        self.marks = self.dram.below.marks
        self.disk.grow(num_on_disk)
        self.budget = Budget(bytes_per_day, least_bytes)
        parts = self.disk, slot_blocks, self.budget, self.account
        self.saving = Saving(self.dram, self.marks, *parts)
        self.now = NOW

    def store(self, program: str, chain: list[Key], num_prompt: int = 0) -> None:
        ends = list(range(1, len(chain) + 1))
        slots = self.dram.reserve(chain, program, self.now, None, num_prompt, ends)
        self.dram.settle(slots, stored=True)

    def next(self, num_wanted: int = MANY) -> Batch | None:
        self.now += 1.0
        return self.saving.next(num_wanted, None, self.now)

    def save(self, num_steps: int = 10) -> list[Key]:
        """Take so many steps; returns the names of what was written, in order."""
        written: list[Key] = []
        for _ in range(num_steps):
            batch = self.next()
            if batch is not None:
                numbers = self.saving.place(batch)
                self.disk.settle(numbers, written=True)
                length = len(batch.tickets) // len(batch.keys)
                self.marks.save(batch.tickets[: len(numbers) * length])
                written += batch.keys[: len(numbers)]
        return written


def test_what_would_leave_next_is_written_first_and_all_of_it_once() -> None:
    rig = Rig(20)
    rig.store("a", keys("a", 8))
    rig.store("b", keys("b", 12))
    first = rig.next(2)
    assert rig.saving.goes_on
    assert first is not None
    assert (first.program, first.keys, first.depths) == ("a", keys("a", 8, start=6), [6, 7])
    assert rig.dram.keys_of(first.tickets) == first.keys
    written = rig.save()
    assert sorted(written) == sorted(keys("a", 8) + keys("b", 12))
    assert rig.save() == []
    assert not rig.saving.goes_on


def test_looking_changes_nothing_in_dram() -> None:
    rig = Rig(20)
    rig.store("a", keys("a", 8))
    rig.store("b", keys("b", 12))
    before = [list(chain.tickets) for chain in rig.dram.next_to_leave(None)]
    rig.save()
    assert [list(chain.tickets) for chain in rig.dram.next_to_leave(None)] == before
    prove_dram(rig.dram)


@pytest.mark.parametrize("length", [2, 3])
def test_a_disk_slot_takes_blocks_that_lie_side_by_side_counted_from_the_head(length: int) -> None:
    rig = Rig(20, slot_blocks=length)
    rig.store("a", keys("a", 8))
    batch = rig.next()
    assert batch is not None
    names = keys("a", 8)[length - 1 :: length]
    assert (batch.keys, batch.depths) == (names, list(range(len(names))))
    assert rig.dram.keys_of(batch.tickets) == keys("a", len(names) * length)


def test_a_disk_slot_of_which_a_block_is_missing_is_not_written() -> None:
    rig = Rig(20, slot_blocks=3)
    slots = rig.dram.reserve(keys("a", 6), "a", NOW, ends=range(1, 7))
    rig.dram.settle(slots[:5], stored=True)  # the last one's store is under way
    assert rig.save() == [keys("a", 3)[2]]


def test_what_finished_or_superseded_is_not_written() -> None:
    rig = Rig(20)
    rig.store("a", keys("a", 4))
    demote(rig.dram, "a")
    rig.store("b", keys("c", 1) + keys("b", 3), num_prompt=1)
    rig.store("b", keys("c", 4), num_prompt=2)  # the answer came back anew
    assert rig.save() == keys("c", 4)


def test_what_is_on_disk_already_is_not_written_again() -> None:
    rig = Rig(20)
    numbers = rig.disk.reserve("a", keys("a", 2), [0, 1])
    rig.disk.settle(numbers, written=True)
    rig.store("a", keys("a", 4))  # computed anew
    assert rig.save() == keys("a", 4, start=2)
    assert rig.marks.is_saved[:4].all()


@pytest.mark.parametrize("length", [1, 2])
def test_what_left_the_disk_while_dram_has_it_is_written_again(length: int) -> None:
    rig = Rig(20, slot_blocks=length, num_on_disk=24 // length)
    rig.store("a", keys("a", 12))
    assert len(rig.save()) == 12 // length
    num = 18 // length
    others = rig.saving.place(Batch("b", NO_TICKETS, keys("b", num), list(range(num))))
    assert rig.disk.num_evicted == 6 // length
    rig.disk.settle(others, written=False)
    assert rig.save() == keys("a", 12)[length - 1 :: length][6 // length :]


def test_a_disk_smaller_than_dram_takes_only_what_leaves_next() -> None:
    rig = Rig(40, num_on_disk=39)
    rig.store("a", keys("a", 20))
    rig.store("b", keys("b", 20))
    assert set(rig.save()) == set(keys("a", 20, start=16))


@pytest.mark.parametrize(("num_on_disk", "num_bad"), [(50, 11), (3, 0), (10, 7), (10, 10)])
def test_at_rest_nothing_is_written_over_and_over(num_on_disk: int, num_bad: int) -> None:
    """Not even where the disk failed in so many slots that DRAM, or its coldest, does not fit."""
    rig = Rig(40, num_on_disk=num_on_disk)
    failed = rig.disk.reserve("f", keys("f", num_bad), range(num_bad))
    rig.disk.settle(failed, written=False, is_bad=True)
    rig.store("a", keys("a", 20))
    rig.store("b", keys("b", 20))
    rig.save(40)
    assert not rig.save(40)
    assert not rig.saving.goes_on


@pytest.mark.parametrize("num_on_disk", [2, 6, 11])
def test_at_rest_no_more_is_written_than_dram_holds_though_disk_slots_share_blocks(
    num_on_disk: int,
) -> None:
    """Programs whose common prefix ends inside a disk slot: each disk slot has blocks that others
    have, too, so what fits by number does not fit."""
    rig = Rig(44, slot_blocks=8, num_on_disk=num_on_disk)
    head = keys("head", 4)
    for number in range(10):
        rig.store(f"p{number}", head + keys(f"p{number}.", 8, start=4))
    most = 10  # disk slots that DRAM's blocks make
    assert len(rig.save(100)) <= most
    assert not rig.save(100)
    assert not rig.saving.goes_on
    rig.store("p0", head + keys("p0.", 16, start=4))
    assert len(rig.save(100)) <= 2 + most, "DRAM has changed"


def test_without_budget_to_spare_only_the_coldest_tenth_is_written() -> None:
    rig = Rig(40, bytes_per_day=100)
    rig.budget.take(55)
    for name in "abab":  # each is used twice
        rig.store(name, keys(name, 20))
    assert set(rig.save()) == set(keys("a", 20, start=16))


def test_the_emptier_the_bucket_the_more_often_a_block_must_have_been_used() -> None:
    budget = Budget(1000, 1)
    seen = []
    for _ in range(12):
        seen.append(budget.least_uses(NOW))
        budget.take(100)
    assert seen == [*[1.0] * 6, 2.0, 4.0, 8.0, 16.0, np.inf, np.inf]
    assert budget.least_uses(NOW + 0.2 * DAY_S) == np.inf  # two hundred were owed
    assert budget.least_uses(NOW + 0.6 * DAY_S) == 2.0
    assert Budget(0, 1).least_uses(NOW) == 1.0


def test_a_burst_may_write_what_a_day_brings_and_no_idle_time_brings_more() -> None:
    budget = Budget(1000, 1)
    assert budget.fill(NOW) == 1.0
    assert budget.fill(NOW + 100 * DAY_S) == 1.0
    budget.take(1000)
    assert budget.least_uses(NOW + 100 * DAY_S) == np.inf
    assert budget.fill(NOW + 100.5 * DAY_S) == pytest.approx(0.5)


def test_what_an_earlier_server_had_spent_is_spent_less_what_came_since() -> None:
    budget = Budget(2400, 1)
    budget.restore(1800, DAY_S / 4)
    assert budget.fill(NOW) == 0.5
    budget = Budget(2400, 1)
    budget.restore(1800, 100 * DAY_S)
    assert budget.fill(NOW) == 1.0
    budget.restore(10**9, 0.0)  # of a larger budget: a day's is owed at most
    assert budget.fill(NOW) == 0.0
    assert budget.fill(NOW + DAY_S / 2) == 0.5
    unbounded = Budget(0, 1)
    unbounded.restore(10**9, 0.0)
    assert (unbounded.fill(NOW), unbounded.to_keep(NOW)) == (1.0, None)


def test_what_is_kept_for_a_restart_is_never_less_than_what_is_spent_and_seldom_new() -> None:
    """However fast it is written: a life may end at any moment."""
    random, budget, now = Random(3), Budget(9600, 1), NOW
    kept, kept_at, num_kept, written = 0.0, NOW, 0, 0
    for _ in range(2000):
        now += random.choice([1.0, 60.0, 900.0])
        if budget.least_uses(now) < np.inf:
            budget.take(num_bytes := random.randrange(20))
            written += num_bytes
        if (said := budget.to_keep(now)) is not None:
            kept, kept_at, num_kept = said, now, num_kept + 1
        spent = 9600 * (1.0 - budget.fill(now))
        left = kept - (now - kept_at) * 9600 / DAY_S
        assert spent - 1.0 <= left
    assert num_kept <= 192 * ((now - NOW) / DAY_S + written / 9600) + 1


def test_lives_that_are_killed_write_no_more_than_one_that_goes_on() -> None:
    """A server that is killed every five minutes of a day, and writes all that it may."""
    written, kept = 0, (0, 0.0)
    for number in range(288):
        now = NOW + number * 300.0
        budget = Budget(96_000, 1)
        budget.restore(kept[0], now - kept[1])
        while budget.least_uses(now) < np.inf:
            budget.take(100)
            written += 100
            if (said := budget.to_keep(now)) is not None:
                kept = said, now
    assert 96_000 <= written <= 2 * 96_000 + 100


def test_a_prompt_that_many_share_is_written_with_little_budget_left() -> None:
    rig = Rig(100, bytes_per_day=1000)
    for name in "abcdef":
        rig.store(name, [*keys("s", 5), *keys(name, 5)])
    rig.budget.fill(NOW)
    rig.budget.take(650)  # four uses are asked for
    rig.now = NOW - 1.0
    rig.dram.grow(0)
    for chain in list(rig.dram.next_to_leave(None)):
        numbers = numbers_of(chain.tickets)
        admitted = rig.saving._admitted(numbers, np.arange(10), 4.0)
        assert rig.dram.keys_at(numbers[admitted]) == keys("s", 5)
    assert rig.account.total("disk_refused_blocks", "once") == 6 * 5


@settings(max_examples=200)
@given(
    length=st.integers(1, 4),
    chains=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(1, 12))),
    num_wanted=st.integers(1, 5),
)
def test_whatever_is_stored_each_disk_slot_is_written_once_with_its_own_blocks(
    length: int, chains: list[tuple[str, int, int]], num_wanted: int
) -> None:
    """Chains that fork at any place, in a DRAM that is too small for them."""
    rig, seen, before = Rig(30, slot_blocks=length), set(), dict[Key, Key]()
    for number, (name, shared, num_new) in enumerate(chains):
        chain = [*keys(name, shared), *keys(f"{name}{number}.", shared + num_new, start=shared)]
        rig.store(name, chain)
        before.update(itertools.pairwise(chain[::-1]))
        for _ in range(3):
            batch = rig.next(num_wanted)
            if batch is None:
                continue
            assert len(batch.keys) <= num_wanted
            named = rig.dram.keys_of(batch.tickets)
            for place, (key, depth) in enumerate(zip(batch.keys, batch.depths, strict=True)):
                blocks = named[place * length : (place + 1) * length]
                assert key == blocks[-1]
                assert key not in seen
                seen.add(key)
                whole = [key]
                while whole[-1] in before:
                    whole.append(before[whole[-1]])
                assert whole[:length][::-1] == blocks
                assert len(whole) == (depth + 1) * length
            numbers = rig.saving.place(batch)
            rig.disk.settle(numbers, written=True)
            rig.marks.save(batch.tickets)
        prove_dram(rig.dram)


def test_it_goes_on_for_what_came_since_the_last_pass_while_there_is_budget() -> None:
    rig = Rig(num_slots=MANY)
    rig.store("b", keys("b", 3))
    assert len(rig.save(num_steps=2)) == 3
    assert not rig.saving.goes_on
    rig.store("a", keys("a", 3))
    rig.now -= 0.9  # too soon for another pass
    assert rig.next() is None
    assert rig.saving.goes_on
    assert len(rig.save()) == 3
    assert not rig.saving.goes_on


def test_what_has_just_come_is_written_without_waiting_for_a_pass() -> None:
    rig = Rig(num_slots=MANY, slot_blocks=2)
    rig.store("b", keys("b", 4))
    assert len(rig.save(num_steps=2)) == 2
    rig.store("old", keys("old", 8))
    rig.store("a", keys("a", 4))
    rig.store("a", keys("a", 7))
    for program in ("a", "gone", "a"):
        rig.saving.came(program)
    rig.now -= 0.9  # too soon for another pass
    batch = rig.next()
    assert batch is not None
    assert (batch.program, batch.keys) == ("a", keys("a", 6)[1::2])
    rig.marks.save(batch.tickets)
    rig.now -= 1.0
    assert rig.next() is None
    assert sorted(rig.save()) == sorted(keys("old", 8)[1::2])


def test_what_has_just_come_waits_with_all_else_where_there_is_no_budget_to_spare() -> None:
    rig = Rig(num_slots=MANY, bytes_per_day=1, least_bytes=100)
    rig.budget.take(60)
    rig.store("a", keys("a", 3))
    rig.saving.came("a")
    assert rig.next() is None
    assert not rig.saving.goes_on


def test_it_does_not_go_on_for_what_there_is_no_budget_for() -> None:
    rig = Rig(num_slots=MANY, bytes_per_day=1, least_bytes=100)
    rig.budget.take(60)
    rig.store("a", keys("a", 3))
    assert not rig.save()
    assert not rig.saving.goes_on


def test_writing_is_over_after_three_attempts_within_an_hour() -> None:
    attempts = Attempts()
    assert [attempts.fail(begun, now) for begun, now in ((0.0, 1.0), (2.0, 3.0))] == [False, False]
    assert attempts.may_begin(4.0, 9)
    assert attempts.fail(4.0, 5.0)
    assert attempts.is_over
    assert not attempts.may_begin(6.0, 0)
    assert attempts.may_begin(5.0 + RETRY_S, 0)
    assert not attempts.may_begin(5.0 + RETRY_S, 1), "one at a time"
    assert not attempts.fail(6.0 + RETRY_S, 7.0 + RETRY_S), "that is known"
    assert not attempts.may_begin(8.0 + RETRY_S, 0)


def test_writes_under_way_at_once_fail_as_one_attempt() -> None:
    attempts = Attempts()
    assert not any(attempts.fail(0.0, now) for now in (1.0, 1.0, 2.0, 3.0))
    assert not attempts.is_over
    hours = [attempts.fail(hour * 3700.0, hour * 3700.0 + 1.0) for hour in range(1, 9)]
    assert not any(hours), "two in an hour at most"


def test_what_was_under_way_when_writing_ended_does_not_begin_it_again() -> None:
    attempts = Attempts()
    for begun in (1.0, 2.0, 3.0):
        attempts.fail(begun, begun + 0.5)
    assert not attempts.succeed(3.0)
    assert attempts.is_over
    assert attempts.succeed(3.5 + RETRY_S)
    assert not attempts.is_over
    assert not attempts.fail(9e3, 9e3 + 1.0), "it counts anew"


def test_a_late_write_halves_what_is_written_at_once_and_each_in_time_adds_a_little() -> None:
    depth = Depth(32)
    for _ in range(9):
        depth.ended(32, 0.0, 5.0, is_late=True)
    assert depth.num_slots == 256
    for number in range(8):
        depth.ended(32, 6.0 + 2 * number, 11.0 + 2 * number, is_late=True)
    assert depth.num_slots == 32, "those begun since the last time, each time"
    for _ in range(10):
        depth.ended(32, 100.0, 101.0, is_late=False)
    assert depth.num_slots == 37
    for _ in range(1000):
        depth.ended(32, 100.0, 101.0, is_late=False)
    assert depth.num_slots == 537
    for number in range(20):
        depth.ended(1, 200.0 + 9 * number, 205.0 + 9 * number, is_late=True)
    assert depth.num_slots == 1


def test_more_is_written_at_once_where_a_step_outlasts_it_and_less_where_it_does_not() -> None:
    depth = Depth(1)
    assert depth.most(0) == LEAST_DEPTH  # nothing was begun: the disk was not dry
    for most in (2 * LEAST_DEPTH, 4 * LEAST_DEPTH):
        depth.begun(depth.most(LEAST_DEPTH // 2))
        assert depth.most(0) == most
    depth.begun(most - 1)  # there was no more to write
    assert depth.most(0) == most
    assert depth.most(most // 2) == most
    assert depth.most(most // 2 + 1) == most // 2
    for _ in range(100):
        assert LEAST_DEPTH <= depth.most(most) <= most
    for _ in range(100):
        depth.begun(MOST_DEPTH)
        assert LEAST_DEPTH <= depth.most(0) <= MOST_DEPTH
    assert depth.most(0) == MOST_DEPTH
