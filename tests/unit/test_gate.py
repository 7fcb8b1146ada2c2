"""The gate alone: who is held, for how long, and what it reckons with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from continuum_connector.costs import Costs
from continuum_connector.forecast import Gaps
from continuum_connector.observe.account import OPENED, Account
from continuum_connector.programs.program import Hints, Identity, IdentitySource, Program
from continuum_connector.scheduler.turns import Away, Turn
from continuum_connector.scheduler.waits import FIRST_CYCLE_S, Because, Gate, LetIn
from continuum_connector.toolcalls import UNREAD
from continuum_connector.tools.analysis.words import told

BLOCK = 16
VRAM = 100  # blocks
TOKENS = 60 * BLOCK  # two such programs do not fit


class Server:
    """A gate, what it reckons with, and the turns that came to it; time moves when told."""

    def __init__(self, wait_s: float = 30.0, room: int = VRAM) -> None:
        self.now = 1000.0
        self.gaps = Gaps()
        self.away = Away(self.gaps, 100)
        self.since: dict[str, float] = {}
        self.costs = Costs(1 << 20)
        self.gate = Gate(
            *(wait_s, lambda: room, lambda tokens: -(-tokens // BLOCK), self.costs, self.away, 100),
            account=Account(),
        )
        self.turns: dict[str, Turn] = {}
        self.programs: dict[str, Program] = {}

    def turn(self, name: str, tokens: int = TOKENS, **hints: Any) -> bool:
        """A turn of that program arrives; returns whether it is held. Its id: name and number."""
        program = self.programs.setdefault(
            name, Program(name, IdentitySource.CLIENT, self.now, num_turns=0)
        )
        program.num_turns += 1
        program.num_active += 1
        identity = Identity(name, IdentitySource.CLIENT, Hints(**hints))
        request = f"{name}{program.num_turns}"
        turn = Turn(request, program, identity, program.num_turns, self.now)
        self.away.arrived(name, self.since.get(name), self.now)
        self.turns[request] = turn
        return self.gate.holds(turn, tokens, len(self.turns))

    def finish(self, request: str, tokens: int = TOKENS, is_back: bool = True) -> None:
        """The turn ends; `is_back`: its program is expected again."""
        turn = self.turns.pop(request)
        self.gate.left(turn)
        turn.program.num_active -= 1
        turn.program.num_finished += 1
        if is_back:
            self.away.left(turn.program, UNREAD, self.now)
            self.since[turn.program.key] = self.now
        else:
            self.away.ended(turn.program.key, self.now)
        if turn.is_let_in:
            self.gate.finished(turn, tokens, self.now)

    def open(self, seconds: float = 0.0) -> dict[str, Because]:
        """So much later, before a step: who is let in, and why."""
        self.now += seconds
        opened = self.gate.open(len(self.turns), self.now)
        return {turn.request_id: because for turn, because in opened}


def busy(**kwargs: Any) -> Server:
    """A server whose room one program fills."""
    server = Server(**kwargs)
    assert not server.turn("a"), "nobody else is there"
    return server


# --- who is held, and what lets them in ---------------------------------------------------
def test_the_first_in_line_begins_as_soon_as_the_engine_is_empty() -> None:
    server = busy()
    assert all(server.turn(name) for name in "bc")
    server.finish("a1")
    assert server.open() == {"b1": Because.EMPTY}


def test_a_program_waits_while_it_would_push_another_out_and_begins_when_it_fits() -> None:
    server = busy()
    assert server.turn("b")
    assert server.open(1.0) == {}
    server.finish("a1", is_back=False)
    server.turn("c", tokens=1, final=True)  # somebody runs, so it is not the empty engine
    assert server.open() == {"b1": Because.FITS}


def test_whoever_waits_long_enough_begins() -> None:
    server = busy()
    assert server.turn("b")
    assert server.open(29.0) == {}
    assert server.turn("c")
    assert server.open(1.5) == {"b1": Because.DEADLINE}
    assert server.open(27.0) == {}
    assert server.open(2.0) == {"c1": Because.DEADLINE}


def test_infinite_patience_waits_for_room() -> None:
    server = busy(wait_s=math.inf)
    assert server.turn("b")
    assert server.open(10**6) == {}


@pytest.mark.parametrize(
    ("tokens", "hints"), [(TOKENS, {"final": True}), (TOKENS, {"parent": "a"}), (BLOCK, {})]
)
def test_last_turns_children_and_small_prompts_are_never_held(
    tokens: int, hints: dict[str, Any]
) -> None:
    server = busy()
    server.costs.footprint(60)
    assert not server.turn("b", tokens, **hints)


def test_a_program_that_has_begun_is_never_held_again() -> None:
    server = busy()
    server.finish("a1")
    assert not server.turn("b", final=True)
    assert not server.turn("a")


def test_with_a_turn_that_begins_begin_the_others_of_its_program() -> None:
    server = busy()
    assert [server.turn(name) for name in "bcb"] == [True] * 3
    server.finish("a1")
    assert server.open() == {"b1": Because.EMPTY, "b2": Because.EMPTY}
    assert list(server.gate) == ["c1"]
    server.finish("c1")
    assert not server.gate._num_held


def test_a_small_prompt_passes_and_its_program_stands_at_the_gate_once_it_has_grown() -> None:
    server = busy()
    server.costs.footprint(60)
    assert not server.turn("b", BLOCK)
    server.finish("b1", BLOCK)
    assert server.turn("b", TOKENS)


def test_a_program_whose_turn_ended_before_anybody_looked_has_begun() -> None:
    server = busy()
    server.programs["old"] = Program("old", IdentitySource.CLIENT, 0.0, 1, num_finished=1)
    assert not server.turn("old")


def test_with_no_patience_nobody_is_held() -> None:
    server = Server(wait_s=0.0)
    assert not any(server.turn(name) for name in "abc")


def test_a_turn_whose_client_went_away_leaves_the_line() -> None:
    server = busy()
    server.turn("b")
    server.finish("b1", is_back=False)
    assert (len(server.gate._line), server.open(100.0)) == (0, {})


def test_switched_off_everybody_is_let_in_and_nobody_followed() -> None:
    server = busy()
    assert all(server.turn(name) for name in "bc")
    opened = {turn.request_id: because for turn, because in server.gate.let_all_in(server.now)}
    assert opened == dict.fromkeys(("b1", "c1"), Because.SWITCHED_OFF)
    assert (len(server.gate._line), len(server.gate.members), server.gate.blocks) == (0, 0, 0.0)


# --- the working set ----------------------------------------------------------------------
def test_who_is_away_counts_by_its_chance_to_be_back_within_a_cycle() -> None:
    server = busy()
    assert server.gate.blocks == 60
    server.finish("a1")
    forecast = server.gaps.forecast(UNREAD)
    assert server.gate.blocks == pytest.approx(60 * forecast.within(FIRST_CYCLE_S))
    server.now += 600.0
    server.gate.refresh(1, server.now)
    assert server.gate.blocks < 60 * forecast.within(FIRST_CYCLE_S) / 10


def test_a_program_that_nobody_expects_leaves_and_teaches_how_large_programs_get() -> None:
    server = busy()
    server.finish("a1")
    server.turn("a", 2 * TOKENS)
    server.finish("a2", 3 * TOKENS, is_back=False)
    assert (len(server.gate.members), server.gate.blocks) == (0, 0.0)
    assert server.gate.full_size(TOKENS) == 3 * TOKENS


def test_who_has_begun_counts_with_what_it_holds_and_who_has_not_with_what_it_will() -> None:
    """A program gives its room back at its end, before the last of the others has grown up."""
    server = busy(room=3 * 60 + 60)
    server.finish("a1")
    server.turn("a")
    server.finish("a2", 3 * TOKENS, is_back=False)
    server.turn("c")
    assert server.gate.blocks == 60
    assert not server.turn("b"), "60 and three times 60 blocks fit"


def test_what_the_first_turn_found_is_held_by_others() -> None:
    server = busy()
    server.gate.found(server.turns["a1"], 20 * BLOCK)
    server.gate.refresh(1, server.now)
    assert server.gate.blocks == 40


def test_the_cycle_is_the_mean_time_from_turn_to_turn() -> None:
    server = busy()
    for seconds in (4.0, 8.0):
        server.finish(next(iter(server.turns)))
        server.now += seconds
        server.turn("a")
    assert server.gate.cycle_s == pytest.approx(6.0)


def test_a_turn_that_was_passed_at_the_gate_makes_no_cycle_of_negative_length() -> None:
    server = busy()
    assert server.turn("b")
    server.now += 5.0
    assert not server.turn("b", final=True)
    server.now += 40.0
    assert server.open() == {"b1": Because.DEADLINE}
    assert server.gate.cycle_s == FIRST_CYCLE_S


def test_a_program_whose_turn_stands_at_the_gate_is_not_over() -> None:
    server = busy(wait_s=100.0)
    server.costs.footprint(60)
    for number in (1, 2):
        assert not server.turn("b", BLOCK)
        server.finish(f"b{number}", BLOCK)
    server.now += 9.0
    assert server.turn("b")
    server.gate.refresh(10, server.now)
    assert "b" in server.gate.members
    assert server.gate.full_size(1) == 1, "it has not ended with a block"
    assert server.gate.blocks == 60, "at the gate it asks for nothing"
    assert server.open(100.0) == {"b3": Because.DEADLINE}


def test_whoever_leaves_the_gate_unserved_is_over_as_any_other() -> None:
    server = busy()
    server.costs.footprint(60)
    server.turn("b", BLOCK)
    server.finish("b1", BLOCK)
    assert server.turn("b")
    server.finish("b2", is_back=False)
    server.gate.refresh(10, server.now)
    assert "b" not in server.gate.members
    assert not server.gate._num_held


def test_the_table_is_bounded() -> None:
    server = Server()
    for number in range(150):
        server.turn(f"p{number}", BLOCK, parent="p")
    assert (len(server.gate.members), server.gate.blocks) == (100, 100.0)


class Agents(RuleBasedStateMachine):
    """Whatever comes, in whatever order: the bound holds, and the sum is that of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(wait_s=5.0, room=150)
        self.deadlines: dict[str, float] = {}

    @rule(
        name=st.sampled_from("abcdefgh"),
        tokens=st.sampled_from([1, 20, TOKENS, 3 * TOKENS]),
        final=st.sampled_from([None, True]),
        parent=st.sampled_from([None, "a"]),
    )
    def arrive(self, name: str, tokens: int, final: bool | None, parent: str | None) -> None:
        server = self.server
        begun = name in server.gate.members and server.gate.members[name].has_begun
        held = server.turn(name, tokens, final=final, parent=parent)
        assert not (held and (begun or final or parent))
        if held:
            self.deadlines[f"{name}{server.programs[name].num_turns}"] = server.now + 5.0

    @rule(data=st.data(), is_back=st.booleans())
    def end(self, data: st.DataObject, is_back: bool) -> None:
        if self.server.turns:
            request = data.draw(st.sampled_from(sorted(self.server.turns)))
            self.deadlines.pop(request, None)
            self.server.finish(request, data.draw(st.integers(1, 5000)), is_back)

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 7.0, 2000.0]))
    def step(self, seconds: float) -> None:
        self.server.now += seconds
        self._opened(self.server.gate.open(len(self.server.turns), self.server.now))
        late = [r for r, at in self.deadlines.items() if at + 1e-6 <= self.server.now]
        assert not late, "held beyond the bound"
        held, known = len(self.server.gate._line), len(self.server.turns)
        assert not held or known > held, "held, though nobody else is there"

    @rule()
    def switch_off(self) -> None:
        self._opened(self.server.gate.let_all_in(self.server.now))
        assert not self.deadlines

    def _opened(self, opened: Iterator[LetIn]) -> None:
        for turn, _ in opened:
            del self.deadlines[turn.request_id]  # exactly once
            assert turn.is_let_in

    @invariant()
    def the_sum_is_that_of_the_parts(self) -> None:
        gate = self.server.gate
        assert set(gate) == set(self.deadlines)
        assert gate._num_held.total() == len(gate._line)
        blocks = sum(member.blocks for member in gate.members.values())
        assert gate.blocks == pytest.approx(blocks, abs=1e-6)


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=60, stateful_step_count=40)


def test_every_reason_has_its_metric_and_its_words() -> None:
    reasons = {each.value for each in Because}
    assert reasons == set(OPENED)
    for reason in reasons:
        (line,) = told([{"event": "let_in", "because": reason, "held_s": 1.0}])
        assert not line.text.endswith(reason)
