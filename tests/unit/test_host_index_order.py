"""Which chains leave DRAM first: done, superseded, then live ones; shared blocks with the last."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.scheduler.tiers import chains
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import TICKET_BYTES
from tests.unit.chains import NOW, demote, keys, ready, store, touch


class PlainLru:
    """The order without any worth: the coldest program's tail goes; nothing is shared."""

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self.programs: dict[str, int] = {}  # least recently used first -> blocks there

    def touch(self, program: str) -> None:
        if program in self.programs:
            self.programs[program] = self.programs.pop(program)

    def store(self, program: str, length: int) -> None:
        self.programs[program] = self.programs.pop(program, 0)
        while self.programs[program] < length:
            if self.num_free:
                self.num_free -= 1
            else:
                others = (p for p, n in self.programs.items() if n and p != program)
                coldest = next(others, None)
                if coldest is None:
                    return
                self.programs[coldest] -= 1
            self.programs[program] += 1


@pytest.mark.parametrize("is_ranked", [False, True], ids=["no_rank", "last_used_as_rank"])
@given(
    uses=st.lists(
        st.tuples(st.integers(0, 49), st.sampled_from([0, 1, 2, 2, 3, 7])),
        min_size=40,
        max_size=120,
    )
)
@settings(max_examples=25)
def test_without_a_worth_it_is_exactly_least_recently_used(
    is_ranked: bool, uses: list[tuple[int, int]]
) -> None:
    index, model = HostIndex(70), PlainLru(70)
    last_used: dict[str, float] = {}
    rank = last_used.__getitem__ if is_ranked else None
    longest: dict[str, int] = {}
    for now, (number, length) in enumerate(uses):
        program = f"p{number}."
        last_used[program] = float(now)
        if length == 0:
            touch(index, program, now)
            model.touch(program)
            continue
        longest[program] = max(length, longest.get(program, 0))
        store(index, program, keys(program, longest[program]), now, rank)
        model.store(program, longest[program])
        if now % 4 and now < len(uses) - 1:  # to look at all of them takes longest
            continue
        found = {p: ready(index, keys(p, n)) for p, n in longest.items()}
        assert found == {p: model.programs.get(p, 0) for p in longest}


def test_done_leaves_before_superseded_before_live() -> None:
    index = HostIndex(10)
    store(index, "live", keys("live", 3))
    store(index, "back", keys("x", 1) + keys("old", 2), num_prompt=1)
    store(index, "back", keys("x", 1) + keys("new", 2), num_prompt=2)  # the answer came back anew
    store(index, "done", keys("done", 2))
    demote(index, "done")
    left = []
    for length in range(1, 11):
        store(index, "next", keys("next", length))
        left += [key.decode().rstrip("\0") for key in index.gone]
        index.gone.clear()
    live = ["live2", "live1", "live0", "new1", "new0", "x0"]
    assert left == ["done1", "done0", "old1", "old0", *live]


def test_what_is_done_or_superseded_leaves_whatever_it_is_worth() -> None:
    index = HostIndex(7)
    worth = {"back": 9.0, "done": 9.0, "live": 1.0, "next": 0.0}
    store(index, "done", keys("done", 1))
    store(index, "back", keys("new", 1) + keys("old", 2), num_prompt=1)
    store(index, "back", keys("new", 1), num_prompt=2)
    store(index, "live", keys("live", 2))
    demote(index, "done")
    store(index, "next", keys("next", 6), rank=worth.__getitem__)
    assert [ready(index, keys(name, 2)) for name in ("done", "old", "new", "live")] == [0, 0, 1, 2]
    assert ready(index, keys("next", 6)) == 4


def test_a_superseded_tail_leaves_before_another_programs_live_chain() -> None:
    index = HostIndex(9)
    store(index, "other", keys("other", 3))  # colder than all of the fork's
    store(index, "a", keys("x", 1) + keys("old", 3), num_prompt=1)
    store(index, "a", keys("x", 1) + keys("new", 2), num_prompt=2)
    store(index, "b", keys("b", 3))
    assert ready(index, keys("other", 3)) == 3
    assert ready(index, keys("x", 1) + keys("new", 2)) == 3  # the common prefix stays
    assert not any(key in index for key in keys("old", 3))


def test_a_program_that_goes_back_to_a_superseded_chain_has_it_again() -> None:
    index = HostIndex(8)
    old, new = keys("x", 1) + keys("old", 3), keys("x", 1) + keys("new", 3)
    store(index, "a", old, num_prompt=1)
    store(index, "a", new, num_prompt=2)
    assert len(store(index, "a", old, num_prompt=3)) == 0
    store(index, "b", keys("b", 4))
    assert (ready(index, old), ready(index, new)) == (4, 1)


def test_a_turn_takes_nothing_from_a_chain_that_it_does_not_continue() -> None:
    """Side requests, forks, conversations of one name: each chain has its own last use."""
    index = HostIndex(12)
    one, two = keys("s", 1) + keys("one", 3), keys("s", 1) + keys("two", 3)
    store(index, "a", one, num_prompt=1)
    store(index, "a", two, num_prompt=1)  # the same prompt, another answer
    store(index, "b", keys("b", 4))
    store(index, "a", keys("title", 1), num_prompt=1)
    assert (ready(index, one), ready(index, two), ready(index, keys("b", 4))) == (4, 4, 4)
    store(index, "a", [*one, *keys("more", 2)], num_prompt=5)  # it alone is used anew
    assert ready(index, [*one, *keys("more", 2)]) == 6
    title = keys("title", 1)  # a block may be a whole conversation: states make it 500 tokens long
    assert [ready(index, each) for each in (two, keys("b", 4), title)] == [2, 4, 1]
    store(index, "c", keys("c", 2))
    assert [ready(index, each) for each in (two, keys("b", 4), title)] == [1, 3, 1]


def test_a_chain_that_many_newer_ones_do_not_continue_leaves_by_its_own_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent may wait for a hundred workers that were sent under its own id."""
    monkeypatch.setattr(chains, "MAX_BRANCHES", 3)
    index = HostIndex(12)
    store(index, "other", keys("other", 2))
    store(index, "a", keys("waits", 2))
    (waits,) = index.order.current("a")
    for number in range(4):
        store(index, "a", keys(f"worker{number}", 2))
        assert (waits in index.order.current("a")) == (number < 3)
        assert len(index.order.current("a")) == min(number + 2, 4)
    store(index, "b", keys("b", 1))
    assert ready(index, keys("other", 2)) == 1
    assert ready(index, keys("waits", 2)) == ready(index, keys("worker0", 2)) == 2
    store(index, "b", keys("b2", 2))
    assert (ready(index, keys("other", 2)), ready(index, keys("waits", 2))) == (0, 1)
    assert ready(index, keys("worker0", 2)) == 2


def test_all_of_a_program_that_is_over_leaves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was let be, too."""
    monkeypatch.setattr(chains, "MAX_BRANCHES", 1)
    index = HostIndex(8)
    store(index, "other", keys("other", 2))
    for number in range(3):
        store(index, "a", keys(f"worker{number}", 2))
    index.order.demote_all("a")
    store(index, "b", keys("b", 6))
    assert ready(index, keys("other", 2)) == 2


def test_a_chain_that_a_running_turn_has_stays_its_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nothing would take it back when the turn ends."""
    monkeypatch.setattr(chains, "MAX_BRANCHES", 2)
    index = HostIndex(12)
    store(index, "a", keys("lent", 2))
    (lent,) = index.order.current("a")
    index.order.lend(lent, "request")
    for number in range(3):
        store(index, "a", keys(f"other{number}", 2))
    assert lent in index.order.current("a")
    index.order.take_back("a")
    assert lent in index.order.live_of("a")


def test_a_last_turn_ends_what_it_continues_and_nothing_else() -> None:
    index = HostIndex(9)
    store(index, "a", keys("one", 3), num_prompt=2)
    store(index, "a", keys("two", 3), num_prompt=2)
    store(index, "b", keys("b", 3))
    index.demote("a", keys("two", 2) + keys("new", 2), num_prompt=4)
    store(index, "c", keys("c", 4))
    assert [ready(index, keys(name, 3)) for name in ("one", "two", "b")] == [2, 0, 3]


def test_a_turn_that_continues_a_chain_supersedes_it() -> None:
    """Sliding windows move on: the chain does not contain all of the one it continues."""
    index = HostIndex(12)

    def chain(length: int) -> list[bytes]:
        full = keys("a", length)
        window = keys("a", length, start=length - 2, group=1)
        return [key for key in sorted(full + window) if key in full or key in window]

    store(index, "other", keys("other", 3))
    store(index, "a", chain(3))  # 3 + a window of 2
    store(index, "a", chain(5))  # 2 more + the next window
    assert len(index._claims.order.current("a")) == 1
    store(index, "b", keys("b", 2))
    assert ready(index, keys("other", 3)) == 3
    assert not any(key in index for key in keys("a", 3, start=1, group=1))
    assert ready(index, chain(5)) == 7


def test_a_shared_prompt_stays_until_its_last_user_leaves() -> None:
    index = HostIndex(8)
    prompt = keys("system", 2)
    for name in "abc":
        store(index, name, prompt + keys(name, 2))
    demote(index, "c")  # it used the prompt last
    store(index, "d", keys("d", 2))
    assert [ready(index, prompt + keys(name, 2)) for name in "abc"] == [4, 4, 2]
    demote(index, "a")
    demote(index, "b")
    store(index, "d", keys("d", 8))
    assert ready(index, keys("d", 8)) == 8


def test_a_program_that_comes_back_after_its_end_is_live_again() -> None:
    index = HostIndex(6)
    store(index, "a", keys("a", 3))
    store(index, "b", keys("b", 3))
    demote(index, "a")
    demote(index, "a")
    demote(index, "unknown")
    touch(index, "a", NOW)
    store(index, "c", keys("c", 2))
    assert (ready(index, keys("a", 3)), ready(index, keys("b", 3))) == (3, 1)


def test_a_chain_does_not_lose_its_head_while_its_tail_is_busy() -> None:
    index = HostIndex(5)
    store(index, "a", keys("a", 2))
    writing = index.reserve(keys("a", 4), "a", NOW)
    store(index, "b", keys("b", 1))
    assert len(store(index, "c", keys("c", 3)))  # b's, though a is colder
    assert (ready(index, keys("a", 4)), ready(index, keys("b", 1))) == (2, 0)
    index.settle(writing, stored=False)  # what has failed stands in nobody's way
    store(index, "c", keys("c", 5))
    assert ready(index, keys("c", 5)) == 5


def test_claims_on_shared_blocks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 60 * TICKET_BYTES + 4 * chains.CHAIN_BYTES
    monkeypatch.setattr(chains, "MAX_CLAIM_BYTES", limit)
    index = HostIndex(20)
    prompt = keys("system", 15)
    for number in range(30):
        store(index, f"p{number}", [*prompt, *keys(f"p{number}.", 1)])
        all_chains = list(index._claims.order)
        assert index._claims.num_bytes == sum(
            c.tickets.nbytes + chains.CHAIN_BYTES for c in all_chains
        )
        assert index._claims.num_bytes <= limit
    # The latest three keep all of theirs.
    found = [ready(index, [*prompt, *keys(f"p{n}.", 1)]) for n in range(30)]
    assert found == [15] * 27 + [16] * 3


def test_so_are_many_chains_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chain takes beside its claims counts, too."""
    limit = 10 * (chains.CHAIN_BYTES + TICKET_BYTES)
    monkeypatch.setattr(chains, "MAX_CLAIM_BYTES", limit)
    index = HostIndex(1000)
    for number in range(50):
        store(index, f"p{number}", keys(f"p{number}.", 1))
        assert len(list(index._claims.order)) <= 10
    assert index.num_ready == 10


def test_what_a_chain_let_go_of_takes_no_bytes_any_more() -> None:
    index = HostIndex(10)
    store(index, "a", keys("a", 10))
    store(index, "b", keys("b", 4))
    (chain,) = index._claims.order.current("a")
    assert chain.tickets.nbytes == 6 * TICKET_BYTES
    assert chain.tickets.base is None, "a view keeps all of its base alive"


def test_a_chain_takes_no_more_bytes_than_are_counted_for_it() -> None:
    index, prompt = HostIndex(1), keys("system", 1)
    store(index, "p", prompt)
    names = [f"p{number}" for number in range(2000)]
    tracemalloc.start()
    try:
        for name in names:
            index.reserve(prompt, name, NOW)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(list(index._claims.order)) == 2001
    assert taken <= index._claims.num_bytes


def test_a_program_of_a_thousand_branches_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MAX_BRANCHES", 4)
    index = HostIndex(3000)
    looked_at = []
    original = index._table.is_continued
    monkeypatch.setattr(
        index._table, "is_continued", lambda chain: looked_at.append(chain) or original(chain)
    )
    prompt = keys("s", 2)
    for number in range(1000):
        looked_at.clear()
        store(index, "one", [*prompt, *keys(f"b{number}.", 1)])
        assert len(looked_at) <= 5
        assert len(index._claims.order.current("one")) <= 5
    store(index, "other", keys("other", 1998))  # beside 1,002 there is room for all but ...
    kept = [ready(index, [*prompt, *keys(f"b{n}.", 1)]) for n in range(996, 1000)]
    assert kept == [3] * 4
    store(index, "more", keys("more", 996))
    kept = [ready(index, [*prompt, *keys(f"b{n}.", 1)]) for n in (0, 995, 996, 999)]
    assert kept == [2, 2, 3, 3]  # each by its own last use
