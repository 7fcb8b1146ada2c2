"""DramWorth: what the policy is shown of a program with blocks in DRAM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.forecast.forecast import Forecast
from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.scheduler.decider import DramWorth
from continuum_connector.scheduler.turns import Waiting

SOON = Forecast.known(2.0)


class World:
    """Programs by name, each of another arrival; `seen` is what the policy was shown."""

    def __init__(self) -> None:
        self.seen: list[Resident] = []
        self.programs = {
            name: SimpleNamespace(key=name, arrival=at, last_seen=50.0, last_finish=50.0, active=())
            for at, name in enumerate("abcd")
        }
        decider: Any = SimpleNamespace(
            gaps=SimpleNamespace(forecast_of={"a": SOON}.get),
            costs=SimpleNamespace(queueing_s=lambda _now: 12.0),
            policy=SimpleNamespace(dram_rank=lambda resident, _now: self.seen.append(resident)),
        )
        programs: Any = self.programs
        self.waiting = Waiting()
        self.worth = DramWorth(programs, decider, self.waiting)

    def wait(self, *names: str) -> None:
        for name in names:
            turn: Any = SimpleNamespace(program=self.programs[name])
            self.waiting[f"turn{len(self.waiting)}"] = turn

    def shown(self, name: str) -> Resident:
        self.worth.rank(name, 60.0)
        return self.seen[-1]


def test_a_program_whose_turn_waits_is_shown_as_waiting_and_one_that_runs_is_not() -> None:
    world = World()
    world.wait("b")
    assert [world.shown(name).is_waiting for name in "abc"] == [False, True, False]


def test_a_program_waits_as_long_as_one_of_its_turns_does() -> None:
    world = World()
    world.wait("b", "b", "c")
    del world.waiting["turn0"]
    assert world.shown("b").is_waiting
    world.waiting.pop("turn1")
    assert [world.shown(name).is_waiting for name in "bc"] == [False, True]
    world.waiting.clear()
    assert not world.shown("c").is_waiting
    assert world.shown("d").queueing_s == 0.0


def test_what_is_asked_of_those_that_wait_looks_at_none_of_them() -> None:
    """Once a step at least, with thousands of them."""

    class Turn:
        looks = 0

        @property
        def program(self) -> Any:
            Turn.looks += 1
            return world.programs["b"]

    world = World()
    for number in range(1000):
        turn: Any = Turn()
        world.waiting[str(number)] = turn
    Turn.looks = 0
    for name in "abcd":
        world.shown(name)
    assert Turn.looks == 0
    del world.waiting["500"]
    assert Turn.looks == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd-")), max_size=30))
def test_those_that_wait_are_counted_as_if_anew(steps: list[tuple[int, str]]) -> None:
    world, model = World(), dict[str, Any]()
    for number, name in steps:
        if name == "-":
            world.waiting.pop(str(number), None)
            model.pop(str(number), None)
        else:
            turn: Any = SimpleNamespace(program=world.programs[name])
            world.waiting[str(number)] = model[str(number)] = turn
        programs = [turn.program for turn in model.values()]
        assert world.waiting == model
        for each in world.programs.values():
            assert world.waiting.has_program(each.key) is (each in programs)
            ahead = sum(p.arrival < each.arrival for p in programs)
            assert world.waiting.share_ahead(each.arrival) == ahead / max(1, len(programs))


def test_a_program_queues_behind_the_waiting_ones_that_came_before_it() -> None:
    world = World()
    assert world.shown("d").queueing_s == 0.0
    world.wait(*"abc")
    waits = [world.shown(name).queueing_s for name in "abcd"]
    assert waits == pytest.approx([0.0, 4.0, 8.0, 12.0])


def test_the_forecast_is_that_of_its_open_gap_and_none_while_a_turn_is_under_way() -> None:
    world = World()
    assert (world.shown("a").gap, world.shown("a").finished) == (SOON, 50.0)
    assert world.shown("b").gap is NO_FORECAST
    world.programs["b"].active = ("turn",)
    assert world.shown("b").finished is None


def test_a_forgotten_program_leaves_first_without_being_asked_about() -> None:
    world = World()
    assert world.worth.rank("nobody", 60.0) == float("-inf")
    assert not world.seen
