"""DramWorth: what the policy is shown of a program with blocks in DRAM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.costs.forecast import Forecast
from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.scheduler.dram_worth import DramWorth

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
        self.worth = DramWorth(programs, decider)

    def waiting(self, names: str) -> list[Any]:
        return [SimpleNamespace(program=self.programs[name]) for name in names]

    def shown(self, name: str) -> Resident:
        self.worth.rank(name, 60.0)
        return self.seen[-1]


def test_a_program_whose_turn_waits_is_shown_as_waiting_and_one_that_runs_is_not() -> None:
    world = World()
    world.worth.new_step(world.waiting("b"))
    assert [world.shown(name).is_waiting for name in "abc"] == [False, True, False]


def test_who_waits_is_looked_up_anew_in_each_step() -> None:
    world = World()
    for names in ("", "b", "c"):
        world.worth.new_step(world.waiting(names))
        assert world.shown("b").is_waiting is (names == "b")


def test_a_program_queues_behind_the_waiting_ones_that_came_before_it() -> None:
    world = World()
    assert world.shown("d").queueing_s == 0.0
    world.worth.new_step(world.waiting("abc"))
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
