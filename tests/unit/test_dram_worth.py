"""DramWorth: what the policy is shown of a program with blocks in DRAM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.forecast import Forecast
from continuum_connector.policy.base import NO_FORECAST, Resident
from continuum_connector.programs.continuation import Kept
from continuum_connector.programs.program import Identity, IdentitySource, Program
from continuum_connector.scheduler.decisions import DramWorth
from continuum_connector.scheduler.turns import State, Turn, Turns
from tests.unit.chains import request_of

KEPT = Kept.of(request_of([b"block"]), 1, 16)
SOON = Forecast.known(2.0)


def turn_of(request_id: str, program: Any) -> Turn:
    return Turn(request_id, program, Identity(program.key, IdentitySource.CLIENT), 1, 0.0)


def turn_named(world: World, request_id: str) -> Turn:
    turn = world.turns.get(request_id)
    assert turn is not None
    return turn


class World:
    """Programs by name, each of another arrival; `seen` is what the policy was shown."""

    def __init__(self) -> None:
        self.seen: list[Resident] = []
        self.num_levels = 0  # how often the queue's length was asked for
        self.programs: dict[str, Any] = {
            name: SimpleNamespace(
                key=name,
                arrival=at,
                last_seen=50.0,
                num_active=0,
                left={},
                left_at=lambda last_used, name=name: min(last_used, 50.0) if name == "a" else None,
            )
            for at, name in enumerate("abcd")
        }
        self.away = SimpleNamespace(forecast_since=lambda key, _since: {"a": SOON}.get(key))
        decider: Any = SimpleNamespace(
            away=self.away,
            costs=SimpleNamespace(queueing_s=self.queueing_s),
            policy=SimpleNamespace(dram_rank=lambda resident, _now: self.seen.append(resident)),
        )
        programs: Any = self.programs
        self.turns = Turns()
        self.worth = DramWorth(programs, decider, self.turns)

    def queueing_s(self, _now: float) -> float:
        self.num_levels += 1
        return 12.0

    def wait(self, *names: str) -> None:
        for name in names:
            self.programs[name].num_active += 1
            self.turns.begin(turn_of(f"turn{len(self.turns)}", self.programs[name]))

    def shown(self, name: str, last_used: float = 50.0) -> Resident:
        self.worth.rank_at(60.0)(name, last_used)
        return self.seen[-1]


def test_a_program_whose_turn_waits_is_shown_as_waiting_and_one_that_runs_is_not() -> None:
    world = World()
    world.wait("b")
    assert [world.shown(name).is_waiting for name in "abc"] == [False, True, False]


def test_a_program_waits_as_long_as_one_of_its_turns_does() -> None:
    world = World()
    world.wait("b", "b", "c")
    world.turns.move(turn_named(world, "turn0"), State.RUNNING)
    assert world.shown("b").is_waiting
    world.turns.end("turn1")
    assert [world.shown(name).is_waiting for name in "bc"] == [False, True]
    world.turns.end("turn0")
    world.turns.end("turn2")
    assert not world.shown("c").is_waiting
    assert world.shown("d").queueing_s == 0.0


def test_what_is_asked_of_those_that_wait_looks_at_none_of_them() -> None:
    """Once a step at least, with thousands of them."""

    class Watched:
        looks = 0
        state = State.WAITING
        program_arrival = 0.0
        num_prompt_tokens = 0

        def __init__(self, request_id: str) -> None:
            self.request_id = request_id

        @property
        def program(self) -> Any:
            Watched.looks += 1
            return world.programs["b"]

    world = World()
    for number in range(1000):
        turn: Any = Watched(str(number))
        world.turns.begin(turn)
    Watched.looks = 0
    for name in "abcd":
        world.shown(name)
    assert Watched.looks == 0
    world.turns.end("500")
    assert Watched.looks == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd+-")), max_size=30))
def test_those_that_wait_are_counted_as_if_anew(steps: list[tuple[int, str]]) -> None:
    world, known, waiting = World(), dict[str, Any](), dict[str, Any]()
    for number, name in steps:
        request = str(number)
        if name == "-":
            assert world.turns.end(request) is known.pop(request, None)
            waiting.pop(request, None)
        elif name == "+" and request in waiting:
            world.turns.move(turn_named(world, request), State.RUNNING)
            del waiting[request]
        elif name != "+" and request not in known:
            turn = turn_of(request, world.programs[name])
            world.turns.begin(turn)
            known[request] = waiting[request] = turn
        programs = [turn.program for turn in waiting.values()]
        assert {each: world.turns.get(each) for each in world.turns} == known
        assert (len(world.turns), world.turns.num_waiting) == (len(known), len(waiting))
        for each in world.programs.values():
            assert world.turns.has_waiting(each.key) is (each in programs)
            ahead = sum(p.arrival < each.arrival for p in programs)
            assert world.turns.share_ahead(each.arrival) == ahead / max(1, len(programs))


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
    world.programs["b"].num_active = 1
    assert world.shown("b").finished is None


def test_a_copy_that_follows_a_turn_is_no_use_of_its_own() -> None:
    """As when a pin expires, whose blocks belong in DRAM at its end."""
    shown = World().shown("a", last_used=58.0)
    assert (shown.gap, shown.finished, shown.last_used) == (SOON, 50.0, 50.0)


def test_what_a_forgotten_program_left_ranks_by_its_last_use() -> None:
    world = World()
    shown = world.shown("nobody", last_used=40.0)
    assert (shown.last_used, shown.finished, shown.gap) == (40.0, 40.0, NO_FORECAST)
    assert not shown.is_waiting


def test_a_chain_that_waits_for_its_own_turn_is_shown_as_it_is_whatever_else_runs() -> None:
    """A side request of its program is under way, or waits."""
    world = World()
    world.wait("a")
    shown = world.shown("a", last_used=30.0)
    assert (shown.gap, shown.finished, shown.last_used) == (SOON, 30.0, 30.0)
    assert not shown.is_waiting


def test_what_is_the_same_for_all_programs_is_asked_once_when_room_is_made() -> None:
    world = World()
    world.wait(*"abc")
    rank = world.worth.rank_at(60.0)
    for name in "abcd":
        rank(name, 50.0)
    assert [each.queueing_s for each in world.seen] == pytest.approx([0.0, 4.0, 8.0, 12.0])
    assert world.num_levels == 1


def test_what_a_busy_program_no_longer_knows_ranks_by_its_last_use() -> None:
    """A client may send one id for all it does: what its turns left long ago is not in use for
    ever."""
    world = World()
    program = world.programs["a"] = Program("a", IdentitySource.CLIENT, 0.0, last_seen=50.0)
    program.leave(KEPT, None, None, 40.0)
    program.num_active = 1
    world.away.forecast_since = lambda *_: None
    assert world.shown("a", 40.0).finished is None
    shown = world.shown("a", 30.0)
    assert (shown.finished, shown.last_used, shown.gap) == (30.0, 30.0, NO_FORECAST)


def test_what_was_used_after_a_turn_is_what_that_turn_left() -> None:
    program = Program("p", IdentitySource.CLIENT, arrival=0.0)
    for at in (10.0, 20.0):
        program.leave(KEPT, None, None, at)
    assert [program.left_at(at) for at in (5.0, 10.0, 15.0, 30.0)] == [None, 10.0, 10.0, 20.0]


def test_a_chain_that_a_turn_is_back_for_is_not_away_though_the_program_left_another() -> None:
    """As after a compaction: nobody comes back for what the older turn left."""
    world = World()
    program = world.programs["a"] = Program("a", IdentitySource.CLIENT, 0.0, last_seen=50.0)
    for at in (10.0, 40.0):
        program.leave(KEPT, None, None, at)
    world.away.forecast_since = lambda _, since: SOON if since == 10.0 else None
    assert [world.shown("a", at).finished for at in (10.0, 40.0)] == [10.0, 40.0]
    program.num_active = 1
    assert [world.shown("a", at).finished for at in (10.0, 40.0)] == [10.0, None]
