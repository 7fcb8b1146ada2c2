"""Gaps: finish to arrival, the ones that stay open, the restart."""

from __future__ import annotations

from bisect import insort

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector import forecast
from continuum_connector.forecast import (
    EDGES,
    HALF_LIFE,
    MAX_RECORDS,
    MAX_TOOLS,
    Gaps,
    RecordedGaps,
)
from continuum_connector.toolcalls import UNREAD, Asked, Ending

RUN = Asked(Ending.CALLS, ("run",))
ANSWER = Asked(Ending.ANSWER)


def after_json(state: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(state))


def test_a_gap_lasts_from_finish_to_arrival_and_is_learned_once() -> None:
    gaps = Gaps()
    gap = gaps.begin(RUN, 100.0)
    assert gaps.forecast(RUN).num_seen == 0.0
    assert gaps.arrived(gap, 103.5) == 3.5
    assert gaps.forecast(RUN).num_seen == 1.0
    assert gaps.recorded(RUN) == ([3.5], [3.5])
    assert gaps.arrived(gap, 104.0) is None
    gaps.ended(gap, 105.0)
    assert gaps.forecast(RUN).num_seen == 1.0


def test_a_gap_that_is_dropped_teaches_nothing() -> None:
    gaps = Gaps()
    gap = gaps.begin(RUN, 100.0)
    assert gaps.drop(gap)
    assert not gaps.drop(gap)
    assert gaps.arrived(gap, 104.0) is None
    assert (len(gaps), gaps.forecast(RUN).num_seen) == (0, 0.0)


def test_a_gap_whose_program_ends_is_longer() -> None:
    gaps = Gaps()
    begun = [gaps.begin(RUN, 0.0) for _ in range(40)]
    for gap in begun[:20]:
        gaps.arrived(gap, 1.0)
    for gap in begun[20:]:
        gaps.ended(gap, 60.0)
    assert gaps.forecast(RUN).within(10.0) == pytest.approx(0.5, abs=0.08)
    assert len(gaps) == 0


def test_gaps_without_an_end_are_learned_of_while_they_are_open() -> None:
    """Half return after a second, half never; nobody is ever declared done or forgotten."""
    gaps, now = Gaps(), 0.0
    for i in range(400):
        now += 1.0
        gap = gaps.begin(RUN, now)
        if i % 2:
            gaps.arrived(gap, now + 1.0)
    assert len(gaps) == 200
    assert gaps.forecast(RUN).within(10.0) == pytest.approx(0.55, abs=0.06)


def test_a_gap_that_passed_milestones_is_learned_at_its_length() -> None:
    gaps = Gaps()
    for i in range(60):
        start = i * 1000.0
        gap = gaps.begin(RUN, start)
        gaps.arrived(None, start + 90.0)  # any event lets time pass
        gaps.arrived(None, start + 350.0)
        assert gaps.arrived(gap, start + 500.0) == 500.0
    once_each = sum(2.0 ** (-age / HALF_LIFE) for age in range(60))
    assert gaps.forecast(RUN).num_seen == pytest.approx(once_each, rel=0.01)
    assert gaps.forecast(RUN).quantile(0.5) == pytest.approx(500.0, rel=0.2)


def test_beyond_the_grid_a_gap_is_forgotten() -> None:
    gaps = Gaps()
    gap = gaps.begin(RUN, 0.0)
    for now in (1e3, 1e4, 1e5):
        gaps.arrived(None, now)
    assert len(gaps) == 1
    gaps.arrived(None, EDGES[-1])
    assert len(gaps) == 0
    assert gaps.arrived(gap, EDGES[-1] + 1.0) is None


def test_passing_milestones_is_spread_over_calls() -> None:
    gaps = Gaps()
    for _ in range(1000):
        gaps.begin(RUN, 0.0)
    gaps.arrived(None, 100.0)
    assert gaps.forecast(RUN).num_seen < 5.0


def test_recorded_gaps_are_by_name_and_without_people() -> None:
    gaps = Gaps()
    for asked, gap_s in ((RUN, 2.0), (UNREAD, 1.0), (ANSWER, 300.0)):
        gaps.arrived(gaps.begin(asked, 0.0), gap_s)
    assert gaps.recorded(Asked(Ending.CALLS, ("run",))) == ([2.0], [1.0, 2.0])
    assert gaps.recorded(UNREAD) == ((), [1.0, 2.0])
    assert gaps.recorded(ANSWER) == ((), [1.0, 2.0])


@settings(max_examples=60)
@given(st.lists(st.floats(0, 100), min_size=25, max_size=60))
def test_the_window_holds_the_most_recent_in_order(values: list[float]) -> None:
    recorded = RecordedGaps()
    limit = 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "MAX_RECORDS", limit)
        for value in values:
            recorded.add("run", value)
    expected: list[float] = []
    for value in values[-limit:]:
        insort(expected, value)
    assert recorded.of("run") == (expected, expected)


def test_a_gap_beyond_the_grid_is_as_long_as_the_grid() -> None:
    recorded = RecordedGaps()
    recorded.add("run", 1e308)
    assert recorded.of("run") == ([EDGES[-1]], [EDGES[-1]])


def test_recorded_tools_are_bounded() -> None:
    recorded = RecordedGaps()
    for i in range(10 * MAX_TOOLS):
        recorded.add(f"tool {i}", 1.0)
        recorded.add("steady", 1.0)
    assert len(recorded._tools) == MAX_TOOLS
    mine, all_gaps = recorded.of("steady")
    assert len(mine) == len(all_gaps) == MAX_RECORDS


def test_recorded_gaps_of_a_tool_survive_a_flood_of_invented_names() -> None:
    recorded = RecordedGaps()
    for _ in range(20):
        recorded.add("pytest", 30.0)
    for i in range(3 * MAX_TOOLS):
        recorded.add(f"junk {i}", 1.0)
    assert recorded.of("pytest")[0] == [30.0] * 20
