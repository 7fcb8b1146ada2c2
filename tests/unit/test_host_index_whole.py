"""Chains that are of use only as a whole, as those with states or windows: they come whole, they
leave whole, and nobody leaves in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from continuum_connector.scheduler.kv_groups import Key
from continuum_connector.scheduler.tiers import chains
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Tickets
from tests.proofs import prove_dram
from tests.unit.chains import NOW, by_program, demote, keys, store, touch

STATES = 2  # KV groups of states, beside one of full attention


def turn(name: str, length: int) -> list[Key]:
    """What a turn keeps: every block of full attention, and the states at their end."""
    states = [key for group in range(STATES) for key in state(name, length, group + 1)]
    return keys(name, length) + states


def state(name: str, end: int, group: int = 1) -> list[Key]:
    return keys(name, end, start=end - 1, group=group) if end else []


def hit(index: HostIndex, name: str, length: int) -> int:
    """How long a load could be, as vLLM's lookup finds it: [0, h) of full attention and the states
    at h."""
    for end in range(length, 0, -1):
        if all(index.is_ready(key) for key in turn(name, end)):
            return end
    return 0


def test_a_chain_leaves_whole_though_one_slot_is_wanted() -> None:
    index = HostIndex(20, whole=True)
    store(index, "p", turn("p", 8), NOW)
    store(index, "q", turn("q", 8), NOW + 1)
    store(index, "r", turn("r", 1), NOW + 2)  # three slots, of p's ten
    assert (hit(index, "p", 8), hit(index, "q", 8), hit(index, "r", 1)) == (0, 8, 1)
    assert index.num_free == 7
    assert index.num_ready == 10 + 3


def test_what_does_not_fit_whole_is_refused_and_nobody_leaves_for_it() -> None:
    index = HostIndex(20, whole=True)
    store(index, "p", turn("p", 8), NOW)
    store(index, "q", turn("q", 6), NOW + 1)
    assert not len(store(index, "r", turn("r", 19), NOW + 2))
    assert (hit(index, "p", 8), hit(index, "q", 6)) == (8, 6)
    assert (index.num_refused, index.num_evicted) == (21, 0)


def test_nobody_leaves_where_only_those_worth_more_would_make_it_enough() -> None:
    index = HostIndex(20, whole=True)
    store(index, "cheap", turn("cheap", 3), NOW)
    store(index, "dear", turn("dear", 13), NOW + 1)
    worths = {"cheap": 1.0, "new": 2.0, "dear": 3.0}
    assert not len(store(index, "new", turn("new", 4), NOW + 2, worths.__getitem__))
    assert hit(index, "cheap", 3) == 3
    assert len(store(index, "new", turn("new", 3), NOW + 2, worths.__getitem__)) == 5
    assert hit(index, "cheap", 3) == 0


def test_a_turn_that_is_refused_leaves_the_one_before_it_as_it_was() -> None:
    index = HostIndex(12, whole=True)
    store(index, "p", turn("p", 6), NOW)
    assert not len(store(index, "p", turn("p", 12), NOW + 1))
    assert hit(index, "p", 12) == 6
    store(index, "q", turn("q", 2), NOW + 2)
    assert (hit(index, "p", 6), hit(index, "q", 2)) == (6, 2)
    store(index, "r", turn("r", 8), NOW + 3)  # p's blocks and states leave together
    assert (hit(index, "p", 6), hit(index, "q", 2), hit(index, "r", 8)) == (0, 0, 8)


def test_the_states_of_an_older_turn_leave_before_anybodys_chain() -> None:
    index = HostIndex(20, whole=True)
    store(index, "q", turn("q", 6), NOW)
    store(index, "p", turn("p", 4), NOW + 1)
    store(index, "p", turn("p", 6), NOW + 2)  # 6 + 2 and the two states at 4
    assert hit(index, "p", 4) == 4
    store(index, "r", turn("r", 2), NOW + 3)
    assert (hit(index, "p", 4), hit(index, "p", 6), hit(index, "q", 6)) == (0, 6, 6)


def test_a_shared_head_stays_with_the_last_chain_that_wants_it() -> None:
    index = HostIndex(16, whole=True)
    fork = keys("p", 4) + keys("q", 6, start=4) + state("q", 6) + state("q", 6, 2)
    store(index, "p", turn("p", 6), NOW)
    store(index, "q", fork, NOW + 1)  # four blocks of p's
    assert index.num_free == 4
    store(index, "r", turn("r", 5), NOW + 2)
    assert hit(index, "p", 6) == 0
    assert all(index.is_ready(key) for key in fork)


def test_two_chains_that_leave_together_free_what_they_share() -> None:
    index = HostIndex(12, whole=True)
    fork = keys("p", 6) + keys("q", 7, start=6) + state("q", 7) + state("q", 7, 2)
    store(index, "p", turn("p", 6), NOW)
    store(index, "q", fork, NOW + 1)
    assert len(store(index, "r", turn("r", 10), NOW + 2)) == 12
    assert index.num_evicted == 11


def test_a_chain_that_is_read_stays_whole() -> None:
    index = HostIndex(20, whole=True)
    store(index, "p", turn("p", 8), NOW)
    store(index, "q", turn("q", 8), NOW + 1)
    reading = index.acquire(index.find(keys("p", 1)))  # its head only
    store(index, "r", turn("r", 8), NOW + 2)
    assert (hit(index, "p", 8), hit(index, "q", 8), hit(index, "r", 8)) == (8, 0, 8)
    assert not len(store(index, "s", turn("s", 12), NOW + 3))
    index.release(reading)
    assert len(store(index, "s", turn("s", 12), NOW + 3))


def test_too_many_claims_cost_chains_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 4 * (chains.CHAIN_BYTES + 10 * chains.TICKET_BYTES) - 1  # a claim less would do
    monkeypatch.setattr(chains, "MAX_CLAIM_BYTES", most)
    index = HostIndex(100, whole=True)
    for number in range(5):
        store(index, f"p{number}", turn(f"p{number}.", 8), NOW + number)
    assert [hit(index, f"p{number}.", 8) for number in range(5)] == [0, 0, 8, 8, 8]
    assert index.num_ready == 30


class WholeChains(RuleBasedStateMachine):
    """Programs that go on, fork and end, in a DRAM that is too small, by any worth."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(24, whole=True)
        self.now = NOW
        self.writing: list[Tickets] = []
        self.reading: list[Tickets] = []

    @rule(
        name=st.sampled_from(["a", "b", "c"]),
        length=st.integers(1, 14),
        num_prompt=st.integers(0, 2),
        worths=st.none() | st.tuples(*[st.integers(0, 2)] * 3),
        is_slow=st.booleans(),
    )
    def store(
        self,
        name: str,
        length: int,
        num_prompt: int,
        worths: tuple[int, int, int] | None,
        is_slow: bool,
    ) -> None:
        self.now += 1
        rank = worths and dict(zip("abc", map(float, worths), strict=True)).__getitem__
        before, evicted = self.lasting(), self.index.num_evicted
        new = [key for key in turn(name, length) if key not in self.index]
        slots = self.index.reserve(
            turn(name, length), name, self.now, by_program(rank or None), num_prompt
        )
        assert len(slots) in (0, len(new))
        if new and not len(slots):
            assert self.index.num_evicted == evicted
            assert before <= self.lasting()
        if is_slow and len(slots):
            self.writing.append(slots)
        else:
            self.index.settle(slots, stored=True)

    @precondition(lambda self: self.writing)
    @rule(number=st.integers(0, 9))
    def written(self, number: int) -> None:
        self.index.settle(self.writing.pop(number % len(self.writing)), stored=True)

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def read(self, name: str) -> None:
        end = hit(self.index, name, 14)
        if end:
            slots = [self.index.find([key]) for key in turn(name, end)]
            self.reading.append(self.index.acquire(np.concatenate(slots)))
            touch(self.index, name, self.now)

    @precondition(lambda self: self.reading)
    @rule(number=st.integers(0, 9))
    def has_read(self, number: int) -> None:
        self.index.release(self.reading.pop(number % len(self.reading)))

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def demote(self, name: str) -> None:
        demote(self.index, name)

    def lasting(self) -> set[tuple[str, int]]:
        """What is a hit now."""
        ends = ((name, end) for name in "abc" for end in range(1, 15))
        return {(name, end) for name, end in ends if self.is_hit(name, end)}

    def is_hit(self, name: str, end: int) -> bool:
        return all(self.index.is_ready(key) for key in turn(name, end))

    @invariant()
    def all_of_every_chain_is_there(self) -> None:
        prove_dram(self.index)
        for chain in self.index._claims.order:
            assert len(self.index.keys_of(chain.tickets)) == len(chain.tickets)

    @invariant()
    def a_live_chain_is_a_hit_up_to_its_end(self) -> None:
        for chain in self.index._claims.order._live:
            ends = [int(key[1:-4]) + 1 for key in self.index.keys_of(chain.tickets)]
            kept = set(self.index.keys_of(chain.tickets))
            assert kept == set(turn(chain.program, max(ends)))

    def teardown(self) -> None:
        for slots in self.writing:
            self.index.settle(slots, stored=False)
        for slots in self.reading:
            self.index.release(slots)
        self.index.clear()
        assert self.index.num_free == self.index.num_slots


WholeChains.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestWholeChains = WholeChains.TestCase
