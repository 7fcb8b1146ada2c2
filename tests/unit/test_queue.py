"""ProgramQueue: vLLM's queue interface, ranked by something that changes meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from continuum_connector.scheduler import queue as queue_module
from continuum_connector.scheduler.queue import ProgramQueue, Queues


@dataclass(eq=False)
class Waiting:
    request_id: str
    rank: int = 0


class Ranks:
    """The ranks of requests, and a count of how often they were asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, request: Waiting) -> tuple[int]:
        self.num_asked += 1
        return (request.rank,)


def make(*ranks: int) -> tuple[ProgramQueue, list[Waiting]]:
    queue = ProgramQueue(Ranks())
    requests = [Waiting(f"r{i}", rank) for i, rank in enumerate(ranks)]
    for request in requests:
        queue.add_request(request)
    return queue, requests


def drain(queue: ProgramQueue) -> list[int]:
    popped = []
    while queue:
        assert queue.peek_request() in queue
        popped.append(queue.pop_request().rank)
    return popped


def test_the_lowest_rank_comes_first_and_equals_in_order_of_arrival() -> None:
    queue, requests = make(3, 1, 2, 1)
    assert [queue.pop_request() for _ in requests] == [requests[i] for i in (1, 3, 2, 0)]
    assert not queue


def test_iterating_shows_the_order_and_changes_nothing() -> None:
    queue, requests = make(3, 1, 2)
    assert [r.rank for r in queue] == [1, 2, 3]
    assert (len(queue), requests[0] in queue, drain(queue)) == (3, True, [1, 2, 3])


def test_pop_returns_what_peek_showed_even_if_something_better_came_between() -> None:
    """vLLM admits the request it peeked, then pops."""
    queue, requests = make(3, 2)
    assert queue.peek_request() is requests[1]
    better = Waiting("better", 0)
    queue.add_request(better)
    requests[0].rank = 0
    queue.rerank("r0")
    assert queue.pop_request() is requests[1]
    assert queue.pop_request() is better


def test_pop_after_the_peeked_request_went_away_gives_the_next() -> None:
    queue, requests = make(1, 2)
    queue.peek_request()
    queue.remove_requests([requests[0]])
    assert queue.pop_request() is requests[1]


def test_a_turn_that_is_reranked_moves_and_no_other_is_asked() -> None:
    queue, requests = make(1, 5, *range(10, 1010))
    requests[1].rank = 0
    queue._rank.num_asked = 0  # type: ignore[attr-defined]
    queue.rerank("r1")
    queue.rerank("nobody")
    assert queue._rank.num_asked == 1  # type: ignore[attr-defined]
    assert [queue.pop_request().rank for _ in range(3)] == [0, 1, 10]


def test_a_turn_that_left_the_queue_is_reranked_in_vain() -> None:
    queue, requests = make(2)
    queue.remove_request(requests[0])
    queue.rerank("r0")
    assert not queue
    assert not queue._by_id


def test_prepending_puts_requests_where_their_rank_says() -> None:
    queue, _ = make(2, 4)
    queue.prepend_requests([Waiting("a", 3), Waiting("b", 1)])
    queue.prepend_request(Waiting("c", 5))
    assert drain(queue) == [1, 2, 3, 4, 5]


def test_removing_some_leaves_the_others_and_strangers_are_ignored() -> None:
    queue, requests = make(1, 2, 3)
    queue.remove_requests(iter([requests[1], Waiting("stranger")]))
    assert drain(queue) == [1, 3]
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_a_request_may_come_back_after_it_was_popped() -> None:
    queue, _ = make(1, 2)
    first = queue.pop_request()
    first.rank = 9
    queue.prepend_request(first)
    assert drain(queue) == [2, 9]


def test_the_heap_stays_proportional_to_what_waits() -> None:
    queue, _ = make(*range(20))
    for i in range(5000):
        queue.rerank(f"r{i % 20}")
    assert len(queue._heap._entries) <= 64 + 2 * 20
    assert drain(queue) == list(range(20))


def test_every_operation_costs_log_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: comparisons of heap entries per operation."""
    comparisons = 0

    class Counted(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __lt__(self, other: Any) -> bool:
            nonlocal comparisons
            comparisons += 1
            return tuple.__lt__(self, other)

    draw = random.Random(1)
    costs = {}
    for size in (1000, 16_000):
        queue = ProgramQueue(lambda r: Counted((r.rank,)))
        for i in range(size):
            queue.add_request(Waiting(f"r{i}", draw.randrange(10**9)))
        comparisons = 0
        for i in range(200):
            queue.rerank(f"r{i}")
            queue.add_request(Waiting(f"x{i}", draw.randrange(10**9)))
            queue.peek_request()
            queue.pop_request()
        costs[size] = comparisons
    assert costs[16_000] < 2 * costs[1000] < 200 * 200


def test_it_is_a_plain_sorted_list_whatever_happens() -> None:
    draw = random.Random(3)
    queue, live = ProgramQueue(Ranks()), dict[Waiting, int]()
    for step in range(4000):
        match draw.randrange(6):
            case 0 | 1:
                new = Waiting(f"r{step}", draw.randrange(1000) * 10_000)
                new.rank += step  # ties are another test's
                queue.add_request(new)
                live[new] = new.rank
            case 2 if live:
                moved = draw.choice(list(live))
                moved.rank = live[moved] = draw.randrange(1000) * 10_000 + step
                queue.rerank(moved.request_id)
            case 3 if live:
                gone = draw.sample(list(live), min(3, len(live)))
                queue.remove_requests(gone)
                for request in gone:
                    del live[request]
            case 4 if live:
                peeked = queue.peek_request()
                assert peeked.rank == min(live.values())
                if draw.random() < 0.5:
                    assert queue.pop_request() is peeked
                    del live[peeked]
        assert len(queue) == len(live)
    assert [r.rank for r in queue] == sorted(live.values())
    assert drain(queue) == sorted(live.values())


def test_it_offers_all_that_vllms_request_queue_does() -> None:
    names = "add_request pop_request peek_request prepend_request prepend_requests remove_request"
    for name in [*names.split(), "remove_requests", "__bool__", "__len__", "__iter__"]:
        assert callable(getattr(queue_module.ProgramQueue, name))


def test_who_is_held_counts_and_is_not_shown_to_whoever_admits() -> None:
    held = {"r0", "r2"}
    queue = ProgramQueue(Ranks(), lambda request: request.request_id in held)
    requests = [Waiting(f"r{i}", i) for i in range(3)]
    for request in requests:
        queue.add_request(request)
    assert (len(queue), queue.peek_request(), requests[0] in queue) == (3, requests[1], True)
    assert list(queue) == [requests[1], requests[0], requests[2]]
    queue.pop_request()
    assert (bool(queue), len(queue)) == (False, 2)
    queue.release("r2")
    queue.remove_requests(requests)
    assert len(queue) == 0


def test_who_is_put_back_is_never_held() -> None:
    queue = ProgramQueue(Ranks(), lambda request: True)
    queue.prepend_request(Waiting("a"))
    queue.prepend_requests([Waiting("b", 1)])
    assert drain(queue) == [0, 1]


def test_who_is_set_aside_counts_and_is_not_shown_but_stands_in_order() -> None:
    aside = {"r0", "r1", "r2"}
    queue = ProgramQueue(Ranks(), sets_aside=lambda request: request.request_id in aside)
    requests = [Waiting(f"r{i}", rank) for i, rank in enumerate((5, 3, 4, 9))]
    queue.prepend_requests(requests)
    assert (len(queue), queue.first_aside) == (4, ((3,), "r1"))
    assert [each in queue for each in requests] == [True] * 4
    assert [each.rank for each in queue] == [9, 3, 4, 5]
    requests[0].rank = 1
    queue.rerank("r0")
    assert (queue.peek_request(), queue.first_aside) == (requests[3], ((1,), "r0"))
    queue.remove_request(requests[2])
    queue.release("r0")
    queue.release("r1")
    assert queue.first_aside is None
    assert drain(queue) == [1, 3, 9]


def test_of_all_queues_the_first_set_aside_is_released_whichever_it_is_in() -> None:
    aside = {"r0", "r1", "r2"}
    one, other = (
        ProgramQueue(Ranks(), sets_aside=lambda request: request.request_id in aside)
        for _ in range(2)
    )
    one.prepend_requests([Waiting("r0", 5), Waiting("r1", 3)])
    other.prepend_request(Waiting("r2", 4))
    queues = Queues()
    queues.use((one, other))
    assert [queues.release_first_aside() for _ in range(4)] == ["r1", "r2", "r0", None]
    assert (drain(one), drain(other)) == ([3, 5], [4])


def test_what_all_queues_are_told_each_of_them_does() -> None:
    one, (a, b) = make(1, 2)
    other, (c,) = make(3)
    c.request_id = "c"
    queues = Queues()
    assert (bool(queues), queues.first()) == (False, None)
    queues.use((one, other))
    assert (bool(queues), queues.first()) == (True, one)
    queues.set_open(False)
    assert (bool(one), bool(other), queues.first()) == (False, False, None)
    queues.set_open(True)
    b.rank = 0
    queues.rerank("r1")
    assert one.peek_request() is b
    one.remove_requests([a, b])
    assert queues.first() is other
    queues.use(())
    assert not queues


def test_the_released_are_let_in_from_the_queue_that_holds_them() -> None:
    one, other = (ProgramQueue(Ranks(), holds=lambda request: True) for _ in range(2))
    one.add_request(Waiting("a", 1))
    other.add_request(Waiting("b", 2))
    queues = Queues()
    queues.use((one, other))
    queues.release(name for name in ("b", "unknown", "a"))
    assert (drain(one), drain(other)) == ([1], [2])
