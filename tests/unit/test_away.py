"""Away: who is away, since when, and for how long anybody expects them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.forecast import MILESTONES, Gaps
from continuum_connector.programs.program import MAX_LEFT, OVER_S, IdentitySource, Program
from continuum_connector.scheduler.turns import Away, OpenDecision
from continuum_connector.toolcalls import Asked, Ending

RUN = Asked(Ending.CALLS, ("run",))
ANSWER = Asked(Ending.ANSWER)


class Table:
    """Away, told of programs by their names."""

    def __init__(self, bound: int = 10) -> None:
        self.gaps = Gaps()
        self.away = Away(self.gaps, bound)
        self.since: dict[str, float] = {}

    def finished(self, name: str, now: float, asked: Asked = RUN) -> OpenDecision | None:
        """The program's only turn ends; returns the decision that was forgotten for its own."""
        program = Program(name, IdentitySource.CLIENT, 0.0, num_turns=1)
        self.away.left(program, asked, now)
        self.since[name] = now
        return self.away.decided(program, decision(name), now)

    def returned(self, name: str, now: float) -> float | None:
        """Its next turn arrives and is admitted at once."""
        self.away.close(name)
        return self.back(name, now)

    def back(self, name: str, now: float) -> float | None:
        """Its next turn arrives, and continues what the last one left."""
        return self.away.arrived(name, self.since.get(name), now)


def decision(name: str) -> OpenDecision:
    said: dict[str, Any] = dict.fromkeys(("prefill_s", "load_s", "p"), 0)
    said |= dict.fromkeys(("kept_tokens", "decided", "horizon_s"), 0)
    return OpenDecision(name, turn=1, decision="free", **said)


def test_a_program_that_was_never_seen_is_not_away() -> None:
    table = Table()
    assert table.back("p", 1.0) is None
    assert table.away.forecast_of("p") is None
    assert table.away.decision_of("p") is None
    table.away.ended("p", 2.0)
    table.away.close("p")
    assert len(table.away._absences) == 0


def test_who_is_away_is_forecast_by_what_the_turn_asked_for_until_it_is_back() -> None:
    table = Table()
    table.finished("p", 0.0)
    forecast = table.away.forecast_of("p")
    assert forecast is not None
    assert forecast.cdf == table.gaps.forecast(RUN).cdf
    assert table.back("p", 3.0) == 3.0
    assert table.away.forecast_of("p") is None


def test_a_decision_outlives_the_gap_and_the_gap_the_decision() -> None:
    table = Table()
    table.finished("p", 0.0)
    assert table.back("p", 3.0) == 3.0
    assert table.away.decision_of("p") is not None
    table.away.close("p")
    assert len(table.away._absences) == 0
    table.finished("q", 5.0)
    table.away.close("q")
    assert table.back("q", 6.0) == 1.0
    assert len(table.away._absences) == 0


def test_a_side_request_closes_no_gap_but_its_own() -> None:
    table = Table()
    table.finished("p", 0.0)
    assert table.away.arrived("p", None, 10.0) is None, "it continues nothing"
    table.finished("p", 12.0, ANSWER)
    assert table.away.arrived("p", 0.0, 60.0) == 60.0, "the agent is back"
    assert table.gaps.forecast(RUN).num_seen == 1.0
    assert table.away.forecast_since("p", 0.0) is None
    waits = table.away.forecast_since("p", 12.0)
    assert waits is not None
    assert waits.cdf == table.gaps.forecast(ANSWER).cdf
    table.away.ended("p", 70.0)
    assert len(table.gaps) == 0


def test_of_a_program_that_leaves_ever_more_the_oldest_gap_is_dropped() -> None:
    table = Table()
    for number in range(MAX_LEFT + 6):
        table.finished("p", float(number))
    assert len(table.gaps) == MAX_LEFT
    assert table.away.arrived("p", 5.0, 100.0) is None
    assert table.away.arrived("p", 6.0, 100.0) == 94.0


def test_beyond_the_bound_who_is_away_longest_is_forgotten_as_not_back_yet() -> None:
    table = Table(3)
    told = [table.finished(f"p{i}", float(i)) for i in range(5)]
    assert [each and each.program for each in told] == [None, None, None, "p0", "p1"]
    assert len(table.away._absences) == len(table.gaps) == 3
    assert [table.returned(f"p{i}", 10.0) for i in range(5)] == [None, None, 8.0, 7.0, 6.0]
    assert len(table.away._absences) == len(table.gaps) == 0


def test_who_is_away_longest_goes_first_even_after_a_milestone() -> None:
    table = Table(2)
    table.finished("old", 0.0)
    table.finished("new", MILESTONES[0] + 1.0)
    table.finished("newest", MILESTONES[0] + 2.0)
    assert table.away.forecast_of("old") is None
    assert table.away.forecast_of("new") is not None


def test_the_silent_are_looked_for_in_one_place_a_few_per_call_the_longest_first() -> None:
    table = Table(100)
    for i in range(20):
        table.finished(f"p{i}", float(i))
    assert list(table.away.silent(OVER_S)) == []
    seen: list[str] = []
    while found := [each.program.key for each in table.away.silent(OVER_S + 20.0)]:
        assert len(found) < 10
        for name in found:
            table.away.ended(name, OVER_S + 20.0)
            table.away.close(name)
        seen += found
    assert seen == [f"p{i}" for i in range(20)]


def test_a_silent_one_whom_nobody_ends_does_not_hide_the_others() -> None:
    table = Table(100)
    for i in range(20):
        table.finished(f"p{i}", float(i))
    seen = {each.program.key for _ in range(3) for each in table.away.silent(OVER_S + 20.0)}
    assert len(seen) == 20


def test_gaps_that_nobody_watches_are_forgotten_and_decisions_are_not() -> None:
    table = Table()
    table.finished("p", 0.0)
    table.away.forget_gaps()
    assert len(table.gaps) == 0
    assert [each.program for each in table.away.decisions()] == ["p"]
    assert table.returned("p", 5.0) is None
    assert table.gaps.forecast(RUN).num_seen == 0.0


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["finish", "return", "end"]),
            st.integers(0, 6),
            st.floats(0, 1e5),
        ),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_who_is_away_is_what_a_plain_model_says(
    events: list[tuple[str, int, float]], bound: int
) -> None:
    """A dict of start times, oldest dropped: the same gaps come out."""
    table, model, now = Table(bound), dict[str, float](), 0.0
    for kind, which, wait in events:
        now += wait
        program = f"p{which}"
        if kind == "finish":
            table.back(program, now)  # a turn that came back without waiting
            table.finished(program, now)
            model.pop(program, None)
            model[program] = now
            if len(model) > bound:
                del model[next(iter(model))]
        elif kind == "return":
            since = model.pop(program, None)
            seconds = table.returned(program, now)
            if seconds is not None:
                assert since is not None
                assert seconds == pytest.approx(now - since)
            elif since is not None:
                assert now - since > MILESTONES[-1]
        else:
            model.pop(program, None)
            table.away.ended(program, now)
            table.away.close(program)
        assert len(table.gaps) <= len(table.away._absences) == len(model)
        assert {each.program for each in table.away.decisions()} == set(model)
