"""ToolTimes: what a gap teaches, and whom; what is expected of a tool never seen."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector import forecast as tool_times
from continuum_connector.forecast import EDGES, HALF_LIFE, MAX_TOOLS, Forecast, ToolTimes
from continuum_connector.toolcalls import UNREAD, Asked, Ending

ANSWER = Asked(Ending.ANSWER)
TOOL_NAMES = [*tool_times.BY_TOOL, "never_heard_of"]


def asks(*names: str) -> Asked:
    return Asked(Ending.CALLS, names)


def taught(times: ToolTimes, asked: Asked, gap_s: float, n: int = 1) -> ToolTimes:
    for _ in range(n):
        times.observe(asked, gap_s)
    return times


def spread(n: int, median: float, sigma: float) -> list[float]:
    """n quantiles of a log-normal, in an order that is not theirs."""
    normal = tool_times.NormalDist(0.0, sigma)
    values = [median * 2.718281828 ** normal.inv_cdf((i + 0.5) / n) for i in range(n)]
    random.Random(n).shuffle(values)
    return values


@settings(max_examples=40)
@given(
    st.sampled_from(TOOL_NAMES),
    st.floats(0.03, 2000.0),
    st.floats(0.2, 1.5),
)
def test_after_50_gaps_the_seed_has_washed_out(name: str, median: float, sigma: float) -> None:
    """The quantiles are those of the gaps within 20 %, whatever was believed before."""
    times, asked = ToolTimes(), asks(name)
    values = spread(50, median, sigma)
    for value in values:
        times.observe(asked, value)
    f, ordered = times.forecast(asked), sorted(values)
    for q in (0.25, 0.5, 0.75):
        # the two neighbours: between two gaps any value is as good
        low, high = ordered[int(50 * q) - 2], ordered[int(50 * q) + 2]
        assert 0.8 * low <= f.quantile(q) <= 1.2 * high


def test_before_the_first_gap_a_known_tool_is_as_its_seed_and_others_are_anything() -> None:
    times = ToolTimes()
    assert times.forecast(asks("grep")).quantile(0.5) < 1.0
    assert times.forecast(ANSWER).quantile(0.5) > 20.0
    unknown = times.forecast(asks("never_heard_of"))
    assert unknown.quantile(0.1) < 0.5
    assert unknown.quantile(0.9) > 30.0
    assert unknown.num_seen == 0.0


def test_the_seeds_are_what_was_published() -> None:
    def quantiles(curve: tool_times.Curve) -> list[float]:
        f = Forecast([1.0 - p for p in curve])
        return [f.quantile(q) for q in (0.1, 0.5, 0.9)]

    assert quantiles(tool_times.AGENT) == pytest.approx([4.0, 9.0, 72.0], rel=0.25)
    assert quantiles(tool_times.PERSON)[1] == pytest.approx(127.0, rel=0.35)
    fast = Forecast([1.0 - p for p in tool_times.FAST])
    assert fast.held(20.0) - 0.01 * 20.0 == pytest.approx(0.925, rel=0.1)  # 1 % never end


def test_every_seed_is_a_curve_that_leaves_something_open() -> None:
    for curve in (
        *tool_times.BY_TOOL.values(),
        tool_times.EVERYTHING,
        tool_times.TOOLS,
        tool_times.PERSON,
    ):
        assert len(curve) == len(EDGES)
        assert all(0.0 < low <= high <= 1.0 for high, low in pairwise(curve))


def test_one_ten_minute_outlier_among_50_changes_little() -> None:
    times, spoilt, asked = ToolTimes(), ToolTimes(), asks("build")
    for i, value in enumerate(spread(50, 1.0, 0.2)):
        times.observe(asked, value)
        spoilt.observe(asked, 600.0 if i == 30 else value)
    before, after = times.forecast(asked), spoilt.forecast(asked)
    assert before.within(2.0) > 0.95
    assert before.within(2.0) - after.within(2.0) < 0.04
    assert after.quantile(0.5) == pytest.approx(before.quantile(0.5), rel=0.05)


def test_a_shift_is_followed_within_one_half_life() -> None:
    times = taught(ToolTimes(), asks("run"), 0.5, 2000)
    assert times.forecast(asks("run")).quantile(0.5) < 0.6
    taught(times, asks("run"), 20.0, HALF_LIFE // 4)
    assert 0.1 < 1.0 - times.forecast(asks("run")).within(1.0) < 0.3  # it shows at once
    taught(times, asks("run"), 20.0, HALF_LIFE)
    assert times.forecast(asks("run")).quantile(0.5) == pytest.approx(20.0, rel=0.2)


def test_a_tool_leans_on_all_tools_until_it_has_its_own_gaps() -> None:
    times = taught(ToolTimes(), asks("run"), 0.7, 100)
    assert times.forecast(asks("new")).quantile(0.5) == pytest.approx(0.7, rel=0.2)
    assert times.forecast(asks("new")).num_seen == 0.0
    taught(times, asks("new"), 7.0, 20)
    assert times.forecast(asks("new")).quantile(0.5) == pytest.approx(7.0, rel=0.2)
    assert times.forecast(asks("new")).num_seen == pytest.approx(20, rel=0.1)
    assert times.forecast(asks("run")).quantile(0.5) < 0.8


def test_a_tool_never_seen_leans_on_all_tools_not_on_people() -> None:
    times = taught(taught(ToolTimes(), asks("run"), 3.0, 200), ANSWER, 500.0, 200)
    assert times.forecast(asks("new")).quantile(0.5) == pytest.approx(3.0, rel=0.2)
    assert times.forecast(ANSWER).quantile(0.5) == pytest.approx(500.0, rel=0.2)


@pytest.mark.parametrize("asked", [UNREAD, Asked(Ending.CUT)])
def test_a_turn_that_was_not_read_may_be_anything(asked: Asked) -> None:
    times = ToolTimes()
    for _ in range(200):
        taught(taught(times, asks("run"), 3.0), ANSWER, 500.0)
    f = times.forecast(asked)
    assert 0.25 < f.within(10.0) < 0.75
    assert f.within(1000.0) > 0.95
    taught(times, asked, 0.1, 400)
    assert times.forecast(asked).within(0.2) > 0.6
    assert times.forecast(asks("run")).within(0.2) < 0.05


def test_a_call_whose_name_is_not_known_is_some_tool_and_no_person() -> None:
    some = Asked(Ending.CALLS)
    times = ToolTimes()
    for _ in range(200):
        taught(taught(times, asks("run"), 3.0), ANSWER, 500.0)
    assert times.forecast(some).quantile(0.5) == pytest.approx(3.0, rel=0.2)
    assert times.longest(some) is None
    taught(times, some, 20.0, 2000)
    assert times.forecast(some).quantile(0.5) == pytest.approx(20.0, rel=0.2)
    assert times.forecast(asks("new")).quantile(0.5) == pytest.approx(20.0, rel=0.2)
    assert times.forecast(asks("run")).quantile(0.5) == pytest.approx(3.0, rel=0.2)
    assert times.forecast(ANSWER).quantile(0.5) == pytest.approx(500.0, rel=0.2)


def test_of_several_calls_the_one_expected_longest_learns() -> None:
    times = taught(ToolTimes(), asks("cd"), 0.1, 20)
    both = asks("cd", "grind")
    assert times.longest(both) == "grind"
    taught(times, both, 30.0, 20)
    assert times.forecast(asks("cd")).quantile(0.5) < 0.2
    assert times.forecast(asks("grind")).quantile(0.5) == pytest.approx(30.0, rel=0.2)
    assert times.forecast(both).quantile(0.5) == pytest.approx(30.0, rel=0.2)


def test_of_several_unknown_calls_all_learn() -> None:
    times = taught(ToolTimes(), asks("one", "two"), 5.0)
    assert times.forecast(asks("one")).num_seen == times.forecast(asks("two")).num_seen == 1.0
    assert times.forecast(UNREAD).num_seen == 1.0  # it was one gap


def test_calls_of_one_tool_count_as_one() -> None:
    times = taught(ToolTimes(), asks("one", "one", "one"), 5.0)
    assert times.forecast(asks("one")).num_seen == 1.0
    assert times.forecast(asks("one", "one")).cdf == times.forecast(asks("one")).cdf


def test_an_open_gap_lowers_the_hope() -> None:
    times = taught(ToolTimes(), asks("run"), 1.0, 20)
    before = times.forecast(asks("run")).within(1e6)
    for _ in range(20):
        times.observe(asks("run"), 300.0, is_over=False)
    after = times.forecast(asks("run")).within(100.0)
    assert before > 0.99
    assert after == pytest.approx(0.5, abs=0.08)


def test_a_forecast_is_made_once_until_something_changes() -> None:
    times = taught(ToolTimes(), asks("run"), 1.0, 5)
    f = times.forecast(asks("run"))
    assert times.forecast(asks("run")) is f
    times.observe(asks("run"), 9.0)
    assert times.forecast(asks("run")) is not f
    assert times.forecast(asks("run")).within(2.0) < f.within(2.0)


def test_a_forecast_follows_what_is_above_it() -> None:
    times = taught(ToolTimes(), asks("run"), 1.0)
    before = times.forecast(asks("run")).within(5.0)
    taught(times, asks("walk"), 30.0, 50)
    assert times.forecast(asks("run")).within(5.0) < before - 0.2


def test_a_seed_is_half_of_what_is_believed_of_a_known_name() -> None:
    times = taught(ToolTimes(), asks("run"), 300.0, 200)
    assert times.forecast(asks("grep")).within(30.0) == pytest.approx(0.5, abs=0.05)
    assert times.forecast(asks("new")).within(30.0) < 0.05


def test_ten_thousand_names_stay_bounded() -> None:
    times = ToolTimes()
    for i in range(10_000):
        times.observe(asks(f"tool {i} " + "x" * 200), 1.0)
        if i % 100 == 0:
            times.observe(asks("steady"), 7.0)
    assert len(times._tools) == MAX_TOOLS
    assert max(map(len, times._tools)) <= 100
    assert times.forecast(asks("steady")).quantile(0.5) == pytest.approx(7.0, rel=0.2)


def test_a_flood_of_invented_names_pushes_out_itself() -> None:
    times = taught(ToolTimes(), asks("pytest"), 30.0, 20)
    for i in range(3 * MAX_TOOLS):
        taught(times, asks(f"junk {i}"), 1.0, 2)
    f = times.forecast(asks("pytest"))
    assert f.quantile(0.5) == pytest.approx(30.0, rel=0.2)
    assert f.num_seen > 15


def test_among_tools_that_are_all_known_a_new_one_takes_the_place_of_the_oldest() -> None:
    times = ToolTimes()
    for i in range(MAX_TOOLS):
        taught(times, asks(f"tool {i}"), 1.0, 10)
    taught(times, asks("new"), 30.0, 5)
    assert next(iter(times._tools)) == "tool 1"
    assert times._tools["new"].counts.num_seen == pytest.approx(5.0, rel=0.1)


def test_asking_about_a_name_leaves_nothing_behind() -> None:
    times = ToolTimes()
    for i in range(100):
        times.forecast(asks(f"tool {i}", "other"))
    assert not times._tools


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), max_size=3),
            st.floats(0, 1e6),
            st.booleans(),
        ),
        max_size=40,
    )
)
@settings(max_examples=40)
def test_every_forecast_is_a_distribution(observed: list[tuple[list[str], float, bool]]) -> None:
    times = ToolTimes()
    for names, gap_s, is_over in observed:
        asked = asks(*names) if names else ANSWER
        times.observe(asked, gap_s, is_over)
        f = times.forecast(asked)
        assert all(-1e-12 <= low <= high <= 1 + 1e-12 for low, high in pairwise(f.cdf))
