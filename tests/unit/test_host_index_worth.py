"""Eviction by worth: the cheapest leaves, and nothing cheaper than it is stored in its place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.kv_groups import Flags, Key, Numbers
from continuum_connector.scheduler.tiers.base import NothingBelow
from continuum_connector.scheduler.tiers.chains import FIRST_LOOK, MOST_LIVE, NUM_CANDIDATES
from continuum_connector.scheduler.tiers.disk_index import Marks
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Rank
from tests.proofs import prove_dram
from tests.unit.chains import NOW, keys, ready, store, touch

Order = Callable[[HostIndex, float], Rank | None]


def filled(num_programs: int, length: int = 1) -> HostIndex:
    """Return a full index with so many programs, p0. the coldest."""
    index = HostIndex(num_programs * length)
    for number in range(num_programs):
        store(index, f"p{number}.", keys(f"p{number}.", length), now=float(number))
    return index


@pytest.mark.parametrize("cheapest", [0, 7, NUM_CANDIDATES - 1, 84, 99])
def test_the_cheapest_of_either_end_leaves_first(cheapest: int) -> None:
    index = filled(100)
    store(index, "next", keys("next", 1), rank=lambda program: program != f"p{cheapest}.")
    assert list(index.gone) == keys(f"p{cheapest}.", 1)


def test_few_are_ranked_however_many_there_are() -> None:
    index, asked = filled(500, length=4), []

    def rank(program: str) -> float:
        asked.append(program)
        return 0.0

    store(index, "next", keys("next", 12), rank=rank)
    assert list(index.gone)[::4] == [keys(f"p{n}.", 4)[-1] for n in range(3)]  # ties: coldest
    assert len(asked) <= 1 + 2 * NUM_CANDIDATES + 3


def test_busy_chains_do_not_hide_the_cheapest() -> None:
    index = filled(80)
    for number in range(40, 80):  # more than are compared, at the end that was used last
        index.acquire(index.find(keys(f"p{number}.", 1)))
    store(index, "next", keys("next", 1), rank=lambda program: program != "p39.")
    assert list(index.gone) == keys("p39.", 1)


def test_all_can_leave_whichever_end_they_are_seen_from() -> None:
    index = filled(60, length=2)
    store(index, "next", keys("next", 120), rank=lambda program: 0.0)
    assert ready(index, keys("next", 120)) == 120


def test_what_is_worth_less_than_all_that_is_there_is_not_stored() -> None:
    index = HostIndex(5)
    worth = {"low": 1.0, "high": 3.0, "mid": 2.0}
    store(index, "low", keys("low", 2))
    store(index, "high", keys("high", 2))
    store(index, "mid", keys("mid", 4), rank=worth.__getitem__)
    found = [ready(index, keys(name, 4)) for name in ("low", "high", "mid")]
    assert found == [0, 2, 3]  # one free slot, two of `low`, none of `high`
    assert (index.num_evicted, index.num_refused) == (2, 1)
    worth["mid"] = 3.0  # as much is enough
    store(index, "mid", keys("mid", 4), rank=worth.__getitem__)
    assert (ready(index, keys("mid", 4)), index.num_refused) == (4, 1)


class OnDisk(NothingBelow):
    """A disk that has what `save` says; what `soon` has is needed soon."""

    def __init__(self, index: HostIndex, slot_blocks: int, passes_on: bool) -> None:
        self.marks = Marks(index.keys_at, slot_blocks)
        self.grow, self.came, self.used = self.marks.grow, self.marks.came, self.marks.used
        self.left = self.marks.left
        self.passes_on = passes_on

    def takes_all(self, now: float) -> bool:
        return self.passes_on

    def are_kept(self, slots: Numbers) -> Flags:
        return self.marks.are_saved(slots)

    def stays(self, program: str, worth: float, tail: Numbers, num: int) -> bool:
        return program == "soon" or not self.marks.is_saved[tail].any()


def above_a_disk(num_slots: int, slot_blocks: int = 1, passes_on: bool = True) -> HostIndex:
    """An index whose blocks are on disk once `save` says so."""
    return HostIndex(num_slots, below=lambda index: OnDisk(index, slot_blocks, passes_on))


def save(index: HostIndex, chain: list[Key]) -> None:
    assert isinstance(index.below, OnDisk)
    index.below.marks.save(index.find(chain))


def by_name(program: str) -> float:
    return {"low": -30.0, "high": -8.0, "higher": -4.0, "soon": -0.5}[program]


@pytest.mark.parametrize("passes_on", [False, True])
def test_what_is_on_disk_leaves_for_what_is_worth_less_where_that_goes_there_too(
    passes_on: bool,
) -> None:
    index = above_a_disk(4, passes_on=passes_on)
    store(index, "higher", keys("higher", 2))
    store(index, "high", keys("high", 2))
    save(index, keys("higher", 2) + keys("high", 2))
    store(index, "low", keys("low", 3), rank=by_name)
    found = [ready(index, keys(name, 3)) for name in ("high", "higher", "low")]
    assert found == ([0, 1, 3] if passes_on else [2, 2, 0])
    assert index.residence.seconds(NOW) == math.inf, "nobody has lost anything"


def test_nobody_loses_what_no_disk_has_to_what_is_worth_less() -> None:
    index = above_a_disk(6)
    store(index, "high", keys("high", 4))
    store(index, "higher", keys("high", 2) + keys("higher", 4, start=2))
    save(index, keys("high", 2) + keys("high", 4, start=3))
    save(index, keys("higher", 4, start=3))
    store(index, "low", keys("low", 6), rank=by_name)
    assert ready(index, keys("low", 6)) == 2, "the last of either"
    assert ready(index, keys("high", 4)) == 3
    assert ready(index, keys("high", 2) + keys("higher", 4, start=2)) == 3


def test_what_is_on_disk_leaves_before_what_is_not_though_that_is_worth_less() -> None:
    index = above_a_disk(4)
    store(index, "high", keys("high", 2))
    store(index, "higher", keys("higher", 2))
    save(index, keys("higher", 2))
    worth = {"high": -8.0, "higher": -4.0, "new": -2.0}
    store(index, "new", keys("new", 3), rank=worth.__getitem__)
    assert [ready(index, keys(name, 3)) for name in ("high", "higher", "new")] == [1, 0, 3]


def test_what_is_needed_sooner_than_it_is_read_back_stays() -> None:
    index = above_a_disk(2)
    store(index, "soon", keys("soon", 2))
    save(index, keys("soon", 2))
    store(index, "low", keys("low", 2), rank=by_name)
    assert (ready(index, keys("soon", 2)), ready(index, keys("low", 2))) == (2, 0)


def test_what_is_needed_soon_leaves_no_earlier_for_being_on_disk() -> None:
    """A turn that waits reads when it arrives, and never again."""
    worth = {"soon": -8.0, "low": -30.0, "new": -2.0}
    index = above_a_disk(4)
    store(index, "soon", keys("soon", 2))
    store(index, "low", keys("low", 2))
    save(index, keys("soon", 2))
    store(index, "new", keys("new", 2), rank=worth.__getitem__)
    assert [ready(index, keys(name, 2)) for name in ("soon", "low", "new")] == [2, 0, 2]


def test_what_is_over_does_not_take_the_place_of_what_is_on_disk() -> None:
    index = above_a_disk(2)
    store(index, "high", keys("high", 2))
    save(index, keys("high", 2))
    store(index, "over", keys("over", 2), rank={"high": -8.0, "over": -math.inf}.__getitem__)
    assert (ready(index, keys("high", 2)), ready(index, keys("over", 2))) == (2, 0)


@pytest.mark.parametrize(("num_saved", "left"), [(4, 2), (2, 5), (0, 5)])
def test_what_no_disk_slot_takes_goes_with_the_one_before_it(num_saved: int, left: int) -> None:
    index = above_a_disk(5, slot_blocks=2)
    high = keys("high", 5)
    store(index, "high", high)
    save(index, high[:num_saved])
    store(index, "low", keys("low", 3), rank=by_name)
    assert ready(index, high) == left


def test_few_are_asked_for_what_a_disk_has_of_them() -> None:
    index = above_a_disk(200)
    for number in range(200):
        store(index, f"p{number}", keys(f"p{number}.", 1))
    asked = []

    def rank(program: str) -> float:
        asked.append(program)
        return by_name("low" if program == "low" else "high")

    store(index, "low", keys("low", 1), rank=rank)
    assert len(asked) <= 2 + MOST_LIVE + 2 * NUM_CANDIDATES
    assert index.num_refused == 1


def test_a_tail_that_is_not_on_disk_costs_little_however_long_its_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num, length = MOST_LIVE + 3, 4 * FIRST_LOOK
    index = above_a_disk(num * length)
    for number in range(num):
        store(index, f"p{number}", keys(f"p{number}.", length))
        save(index, keys(f"p{number}.", length - 1))
    looked: list[int] = []

    def are_saved(marks: Marks, numbers: Numbers) -> Flags:
        looked.append(len(numbers))
        return own(marks, numbers)

    own = Marks.are_saved
    monkeypatch.setattr(Marks, "are_saved", are_saved)
    store(
        index, "low", keys("low", 1), rank=lambda name: by_name("low" if name == "low" else "high")
    )
    assert (len(looked), max(looked)) == (MOST_LIVE, FIRST_LOOK)


def test_a_long_tail_that_is_on_disk_leaves_whole() -> None:
    length, num_saved = 9 * FIRST_LOOK, 6 * FIRST_LOOK
    index = above_a_disk(length)
    store(index, "high", keys("high", length))
    save(index, keys("high", length, start=length - num_saved))
    store(index, "low", keys("low", length), rank=by_name)
    assert ready(index, keys("high", length)) == length - num_saved


def test_nothing_is_refused_while_slots_are_free() -> None:
    index = HostIndex(4)
    store(index, "a", keys("a", 2))
    store(index, "b", keys("b", 2), rank=lambda program: float(program == "a"))
    assert (ready(index, keys("b", 2)), index.num_refused) == (2, 0)


@given(
    worth=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    uses=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 5), st.booleans()),
        max_size=25,
    ),
    busy=st.integers(0, 5),
)
@settings(max_examples=80)
def test_nobody_leaves_for_less_and_what_is_left_of_a_chain_is_its_head(
    worth: list[int], uses: list[tuple[int, int, int, bool]], busy: int
) -> None:
    index = HostIndex(14)
    newest: dict[str, list[bytes]] = {}

    def rank(program: str) -> float:
        return float(worth[int(program)])

    for number, cut, length, is_read in uses:
        program = str(number)
        # A chain that was among the cheapest has let go of what others claim as well.
        kept = {p: claims(index, p) for p in newest if p != program}
        read = kept.get(str(busy), []) if is_read else []
        held = index.acquire(index.find(read))
        newest[program] = keys("s", cut) + keys(f"{program}.{cut}.", length)
        store(index, program, newest[program], rank=rank)
        assert all(ready(index, chain) >= 0 for chain in newest.values())  # no holes
        assert all(key in index for key in read)
        for loser in (p for p, chain in kept.items() if not all(key in index for key in chain)):
            assert rank(loser) <= rank(program)
            idle = [p for p in kept if p != str(busy) and rank(p) < rank(loser)]
            assert not any(key in index for p in idle for key in kept[p] if key not in keys("s", 3))
        index.release(held)
        prove_dram(index)


def claims(index: HostIndex, program: str) -> list[bytes]:
    chains = index._claims.order.current(program)
    return [key for chain in chains for key in index.keys_of(chain.tickets)]


def in_turn(order: Order, num_programs: int = 40, length: int = 8, rounds: int = 10) -> float:
    """Programs return one after the other, as from equal tools; DRAM holds half of them.
    Return the share of blocks found when they return."""
    index = HostIndex(num_programs * length // 2)
    found = asked = 0
    for now in range(num_programs * rounds):
        program = f"p{now % num_programs}."
        chain = keys(program, length)
        hit = ready(index, chain)
        if now >= num_programs:
            found, asked = found + hit, asked + length
        if hit:
            touch(index, program, now)
        store(index, program, chain, now, order(index, now))
    return found / asked


def test_in_cyclic_reuse_the_expected_return_keeps_half_where_last_use_keeps_nothing() -> None:
    """Rank: minus the seconds until the program is expected, from gaps of one length."""

    def by_return(index: HostIndex, now: float) -> Rank:
        return lambda program: (now - int(program[1:-1])) % 40.0 - 40.0

    assert in_turn(lambda index, now: None) == 0.0
    assert in_turn(by_return) == pytest.approx(0.5, abs=0.02)


def test_only_live_chains_that_leave_say_how_long_blocks_stay() -> None:
    index = HostIndex(6)
    store(index, "a", keys("new", 1) + keys("old", 2), now=0.0, num_prompt=1)
    store(index, "a", keys("new", 2), now=1.0, num_prompt=2)
    store(index, "b", keys("b", 2), now=2.0)
    store(index, "c", keys("c", 2), now=9.0)  # takes the superseded chain
    assert index.residence.seconds(9.0) == float("inf")
    store(index, "d", keys("d", 2), now=21.0)
    # Two of a's live blocks left in the last ten seconds, of six slots.
    assert index.residence.seconds(21.0) == 6 * 10.0 / 2
    index.clear()
    assert index.residence.seconds(21.0) == float("inf")
