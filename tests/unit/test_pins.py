"""PinTable: deadlines, ranks and ends of pins; no vLLM, no clock."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from continuum_connector.errors import InvariantError
from continuum_connector.policy.base import After
from continuum_connector.programs.continuation import Kept
from continuum_connector.scheduler.holds import Hold, HoldTable
from continuum_connector.scheduler.kv_groups import ids_of
from continuum_connector.scheduler.turns import LivePin, PinEnd, PinTable
from tests.fakes import FakeBlockPool, taken
from tests.proofs import prove_holds


def pin(program: str, deadline: float = 10.0, arrival: float = 0.0, value: float = 0.0) -> LivePin:
    return LivePin(
        program=program,
        hold=Hold((), np.empty(0, np.int32)),
        blocks=(),
        started=0.0,
        deadline=deadline,
        then=After.DROP,
        rank=(value, -arrival),
        kept=Kept(),
    )


def table(*pins: LivePin) -> PinTable:
    pins_by_program = PinTable()
    for each in pins:
        pins_by_program.add(each)
    return pins_by_program


def programs(pins: object) -> list[str]:
    return [each.program for each in pins]  # type: ignore[attr-defined]


def test_due_pins_come_earliest_first_and_stay_until_removed() -> None:
    pins = table(pin("c", 3.0), pin("a", 1.0), pin("b", 2.0), pin("later", 9.0))
    assert pins.next_deadline() == 1.0
    assert programs(pins.due(0.9)) == []
    assert programs(pins.due(3.0)) == ["a", "b", "c"]
    assert len(pins) == 4
    assert pins.next_deadline() == 9.0


def test_a_deadline_is_due_at_its_very_moment() -> None:
    assert programs(table(pin("a", 1.0)).due(1.0)) == ["a"]


def test_of_those_who_came_back_for_a_pin_the_first_stands_by_it() -> None:
    a = pin("a")
    pins = table(a)
    assert a.first_waiting is None
    for request_id in ("r1", "r2", "r3"):
        pins.expect(a, request_id)
    pins.unexpect(a, "r2")
    assert a.first_waiting == "r1"
    pins.unexpect(a, "r1")
    assert a.first_waiting == "r3"
    pins.remove(a, PinEnd.PRESSURE)
    assert a.first_waiting == "r3", "whose place is another one now"


def test_an_expected_pin_is_never_due_until_the_last_turn_went_away() -> None:
    a = pin("a", 1.0)
    pins = table(a)
    pins.expect(a, "r1")
    pins.expect(a, "r2")
    pins.unexpect(a, "r1")
    assert (pins.next_deadline(), pins.due(100.0)) == (math.inf, [])
    pins.unexpect(a, "r2")
    assert pins.next_deadline() == 1.0
    assert pins.due(100.0) == [a]


def test_the_cheapest_is_of_the_lowest_value_then_of_the_latest_program() -> None:
    pins = table(pin("old", arrival=1), pin("young", arrival=3), pin("worth", arrival=9, value=1.0))
    assert programs(pins.cheapest_first()) == ["young", "old", "worth"]


def test_pins_somebody_came_back_for_give_way_last() -> None:
    young = pin("young", arrival=3)
    pins = table(pin("old", arrival=1), young)
    pins.expect(young, "r")
    assert programs(pins.cheapest_first()) == ["old", "young"]
    pins.unexpect(young, "r")
    assert programs(pins.cheapest_first()) == ["young", "old"]


def test_looking_for_the_cheapest_changes_nothing_even_if_broken_off() -> None:
    pins = table(*(pin(f"p{i}", arrival=i) for i in range(5)))
    for number in range(6):
        cheapest = pins.cheapest_first()
        for _ in range(number):
            next(cheapest, None)
        cheapest.close()
        assert programs(pins.cheapest_first()) == ["p4", "p3", "p2", "p1", "p0"]


def test_a_pin_ended_while_looking_does_not_come_back() -> None:
    pins = table(pin("a", arrival=1), pin("b", arrival=2))
    cheapest = pins.cheapest_first()
    pins.remove(next(cheapest), PinEnd.PRESSURE)
    cheapest.close()
    assert programs(pins.cheapest_first()) == ["a"]


def test_a_program_has_a_pin_for_each_context() -> None:
    one, two = pin("a"), pin("a")
    pins = table(one, pin("b"), two)
    assert pins.of("a") == (one, two)
    pins.remove(one, PinEnd.PRESSURE)
    assert pins.of("a") == (two,)
    assert "a" in pins
    pins.remove(two, PinEnd.EXPIRED)
    assert (pins.of("a"), "a" in pins, len(pins)) == ((), False, 1)


def test_a_pin_ends_once_and_remembers_why() -> None:
    a = pin("a", 1.0)
    pins = table(a)
    pins.remove(a, PinEnd.RETURNED)
    assert a.ended is PinEnd.RETURNED
    assert (pins.due(9.0), programs(pins.cheapest_first()), "a" in pins) == ([], [], False)
    with pytest.raises(InvariantError, match=r"ended twice: PinEnd.RETURNED, now expired"):
        pins.remove(a, PinEnd.EXPIRED)
    pins.add(pin("a"))


def test_pins_may_be_removed_while_iterating() -> None:
    pins = table(*(pin(f"p{i}") for i in range(4)))
    for each in pins:
        pins.remove(each, PinEnd.RESET)
    assert len(pins) == 0


def test_the_heaps_stay_proportional_to_the_pins_that_live() -> None:
    pins = table(*(pin(f"p{i}", deadline=1000.0 + i) for i in range(10)))
    for i in range(5000):
        (again,) = pins.of(f"p{i % 10}")
        pins.expect(again, "r")
        pins.unexpect(again, "r")
    assert max(len(heap._entries) for heap in (pins._by_deadline, pins._by_rank)) < 100


def test_due_is_what_a_plain_list_would_say() -> None:
    draw = random.Random(5)
    pins, live = PinTable(), dict[str, LivePin]()
    now = 0.0
    for step in range(2000):
        now += draw.random()
        match draw.randrange(4):
            case 0:
                new = pin(f"p{step}", now + draw.random() * 20, step)
                pins.add(new)
                live[new.program] = new
            case 1 if live:
                chosen = draw.choice(list(live.values()))
                (pins.unexpect if chosen.waiting else pins.expect)(chosen, "r")
            case 2 if live:
                pins.remove(live.pop(draw.choice(list(live))), PinEnd.SUPERSEDED)
        due = sorted(
            (p for p in live.values() if p.deadline <= now and not p.waiting),
            key=lambda p: p.deadline,
        )
        assert pins.due(now) == due
        for each in due:
            pins.remove(live.pop(each.program), PinEnd.EXPIRED)
        assert pins.next_deadline() == min(
            (p.deadline for p in live.values() if not p.waiting), default=math.inf
        )
        assert list(pins.cheapest_first()) == sorted(
            live.values(), key=lambda p: (p.is_returning, p.rank)
        )


def test_what_is_let_go_gives_way_from_its_tail() -> None:
    """A prefix without its tail is still hit; a tail without its head never is."""
    pool = FakeBlockPool(9)
    turn = pool.take(4)
    holds = HoldTable(pool)
    hold = taken(holds, turn)
    pool.free_blocks(turn)
    holds.release(hold)
    assert pool.state()[0][-4:] == [4, 3, 2, 1]


def test_a_requests_own_references_become_ours() -> None:
    """Whether or not others of ours hold the blocks, the pool counts one reference for all."""
    pool = FakeBlockPool(9)
    first = HoldTable(pool)
    second = HoldTable(pool, beside=first)
    turn = pool.take(4)
    shared = taken(first, turn[1:3])  # the pool counts two: the request's and ours
    hold = second.adopt(turn, ids_of(turn))
    assert [block.ref_cnt for block in turn] == [1, 1, 1, 1]
    assert (first.num_blocks, second.num_blocks) == (2, 4)
    pin = taken(first, turn[:2])
    second.release(hold)
    assert [block.ref_cnt for block in turn] == [1, 1, 1, 0]
    first.release(shared)
    first.release(pin)
    assert [block.ref_cnt for block in turn] == [0, 0, 0, 0]
    assert pool.state()[0][-4:] == [turn[n].block_id for n in (3, 2, 1, 0)]
    prove_holds(first)
