"""Gaps: finish to arrival, the ones that stay open, the restart."""

from __future__ import annotations

import itertools
import random
from bisect import insort

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.policies import return_quantile
from continuum_connector.costs.state_file import run_to_end
from continuum_connector.forecast import gaps as gaps_module
from continuum_connector.forecast.forecast import EDGES, HALF_LIFE, Survival
from continuum_connector.forecast.gaps import MAX_RECORDS, MAX_SAVED, MAX_TOOLS, Gaps, RecordedGaps
from continuum_connector.toolcalls.asked import UNREAD, Asked, Ending

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
        patch.setattr(gaps_module, "MAX_RECORDS", limit)
        for value in values:
            recorded.add("run", value)
    expected: list[float] = []
    for value in values[-limit:]:
        insort(expected, value)
    assert recorded.of("run") == (expected, expected)


def test_what_is_no_gap_is_not_restored() -> None:
    recorded = RecordedGaps()
    saved = {"all": [1.0, -1.0, True, "2"], "tools": {"run": [2.0], "walk": [-3.0], "talk": 4}}
    assert recorded.load_state(saved) == 3
    assert recorded.of("run") == ([2.0], [1.0])
    assert recorded.of("walk") == recorded.of("talk") == ((), [1.0])


def test_a_gap_beyond_the_grid_is_as_long_as_the_grid_and_none_longer_is_restored() -> None:
    recorded = RecordedGaps()
    recorded.add("run", 1e308)
    assert recorded.of("run") == ([EDGES[-1]], [EDGES[-1]])
    assert RecordedGaps().load_state(run_to_end(recorded.to_state())) == 0
    assert recorded.load_state({"all": [], "tools": {"walk": [1e308, 1e-3, 1e308]}}) == 1
    assert return_quantile(recorded.of("walk")[0], 0.9) < 100.0


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


def test_a_restart_forgets_open_gaps_and_nothing_else() -> None:
    rng, gaps = random.Random(3), Gaps()
    for _ in range(300):
        for asked in (RUN, ANSWER, UNREAD, Asked(Ending.CALLS, ("other",))):
            gaps.arrived(gaps.begin(asked, 0.0), rng.expovariate(0.3))
    gaps.begin(RUN, 0.0)
    again = Gaps()
    assert again.load_state(after_json(run_to_end(gaps.to_state()))) == 0
    assert len(again) == 0
    for asked in (RUN, ANSWER, UNREAD):
        assert again.forecast(asked).cdf == pytest.approx(gaps.forecast(asked).cdf, abs=0.01)
        assert again.forecast(asked).num_seen == pytest.approx(
            gaps.forecast(asked).num_seen, rel=0.02
        )
    mine, everyones = again.recorded(RUN)
    assert len(mine) == len(everyones) == MAX_SAVED > 100


def test_the_state_of_a_version_that_told_arguments_apart_still_loads() -> None:
    gaps, again = Gaps(), Gaps()
    for _ in range(20):
        gaps.arrived(gaps.begin(RUN, 0.0), 3.0)
    state = run_to_end(gaps.to_state())
    tool = state["times"]["tools"]["run"]
    tool["classes"] = {"-q path": tool["counts"], "<8": None}
    assert again.load_state(after_json(state)) == 0
    assert again.forecast(RUN).cdf == pytest.approx(gaps.forecast(RUN).cdf)
    assert "classes" not in run_to_end(again.to_state())["times"]["tools"]["run"]


def test_full_tables_are_copied_in_bites_and_may_change_in_between() -> None:
    gaps = Gaps()
    for tool in range(MAX_TOOLS):
        for _ in range(3):
            gaps.arrived(gaps.begin(Asked(Ending.CALLS, (f"tool {tool}",)), 0.0), 1.0)
    num_copied, bites, longest = 0, gaps.to_state(), 0
    with pytest.MonkeyPatch.context() as patch:
        to_state = Survival.to_state

        def counting(counts: Survival) -> tuple[float, float, bytes]:
            nonlocal num_copied
            num_copied += 1
            return to_state(counts)

        patch.setattr(Survival, "to_state", counting)
        for number in itertools.count():
            before = num_copied
            try:
                next(bites)
            except StopIteration as end:
                state = end.value
                break
            longest = max(longest, num_copied - before)
            gaps.arrived(gaps.begin(Asked(Ending.CALLS, (f"new {number}",)), 0.0), 1.0)
    assert longest <= 4
    assert num_copied > MAX_TOOLS
    assert Gaps().load_state(after_json(state)) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@st.composite
def broken_states(draw: st.DrawFn) -> object:
    """A good state with one part, at any depth, replaced by anything."""
    gaps = Gaps()
    gaps.arrived(gaps.begin(RUN, 0.0), 1.0)
    gaps.arrived(gaps.begin(RUN, 0.0), 1.0)
    state = after_json(run_to_end(gaps.to_state()))
    parent, where = {"": state}, ""
    root = parent
    for _ in range(draw(st.integers(0, 6))):
        inner = parent[where]
        if not isinstance(inner, dict | list) or not inner:
            break
        parent = inner  # type: ignore[assignment]
        where = draw(st.sampled_from(list(range(len(inner)) if isinstance(inner, list) else inner)))  # type: ignore[call-overload]
    parent[where] = draw(JSON)
    return root[""]


@settings(max_examples=30)
@given(broken_states())
def test_whatever_is_in_a_state_is_survived(state: object) -> None:
    gaps = Gaps()
    assert gaps.load_state(state) >= 0
    forecast = gaps.forecast(RUN)
    assert 0.0 <= forecast.within(1.0) <= forecast.within(100.0) <= 1.0
    assert gaps.arrived(gaps.begin(RUN, 0.0), 1.0) == 1.0
