"""Whose blocks leave DRAM first: those of the program whose next use is furthest."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.forecast import EDGES, Forecast
from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import Resident
from continuum_connector.policy.baselines import Continuum
from tests.unit.deciding import curve, forecasts

NOW = 1000.0
ADAPTIVE = Adaptive(60.0)
CODING = curve([(2, 0.01), (5, 0.27), (10, 0.58), (15, 0.7), (60, 0.88), (300, 0.97)])


def resident(program: str = "p", arrival: float = 0.0, **known: Any) -> Resident:
    return Resident(program, arrival, **{"last_used": NOW} | known)


def first_out(*residents: Resident, policy: Any = ADAPTIVE) -> list[str]:
    ranked = sorted(residents, key=lambda each: policy.dram_rank(each, NOW))
    return [each.program for each in ranked]


def silent(program: str, age: float, gap: Forecast) -> Resident:
    return resident(program, finished=NOW - age, last_used=NOW - age, gap=gap)


def test_with_sharp_gaps_the_one_just_used_leaves_first() -> None:
    """Cyclic reuse, where LRU would take the very one that is needed next."""
    cycle = [silent(f"{age} s ago", age, Forecast.known(10.0)) for age in (1.0, 4.0, 8.0)]
    assert first_out(*cycle) == ["1.0 s ago", "4.0 s ago", "8.0 s ago"]
    assert first_out(*cycle, policy=Continuum(60.0)) == ["8.0 s ago", "4.0 s ago", "1.0 s ago"]


def test_with_heavy_tails_the_one_that_was_silent_longest_leaves_first() -> None:
    cycle = [silent(f"{age} s ago", age, CODING) for age in (1.0, 30.0, 200.0)]
    assert first_out(*cycle) == ["200.0 s ago", "30.0 s ago", "1.0 s ago"]


def test_one_who_waits_is_served_before_one_who_is_away_and_in_program_order() -> None:
    assert first_out(
        resident("old", arrival=1.0, is_waiting=True),
        resident("new", arrival=2.0, is_waiting=True),
        silent("away", 1.0, CODING),
    ) == ["away", "new", "old"]


def test_the_queue_counts_as_time_until_the_next_use() -> None:
    """Back in 1 s and first in the queue: needed long before the last of those who wait."""
    assert first_out(
        resident("last in the queue", is_waiting=True, queueing_s=100.0),
        resident("nearly back", finished=NOW, gap=Forecast.known(1.0)),
        resident("nearly back, but new", finished=NOW, gap=Forecast.known(1.0), queueing_s=200.0),
    ) == ["nearly back, but new", "last in the queue", "nearly back"]


def test_a_sure_return_in_an_hour_leaves_before_a_likely_one_in_a_second() -> None:
    likely = Forecast([0.7 if edge >= 1.0 else 0.0 for edge in EDGES])
    assert first_out(
        silent("likely", 0.0, likely), silent("sure", 0.0, Forecast.known(3600.0))
    ) == ["sure", "likely"]


def test_where_nothing_is_known_the_least_recently_used_leaves_first() -> None:
    unknown = [resident(f"{age} s ago", last_used=NOW - age) for age in (1.0, 90.0, 5.0)]
    assert first_out(*unknown) == ["90.0 s ago", "5.0 s ago", "1.0 s ago"]


@given(forecasts(), st.floats(0, 1e5))
def test_soonest_by_brute_force(forecast: Forecast, age: float) -> None:
    p_now, held_now = forecast.within(age), forecast.held(age)
    ratios = [
        (forecast.held(edge) - held_now) / (forecast.within(edge) - p_now)
        for edge in EDGES
        if edge > age and forecast.within(edge) - p_now > 1e-6
    ]
    found = forecast.soonest(age)
    if not ratios:
        assert found == math.inf
    elif 1.0 - forecast.within(age) > 1e-3:  # else the differences above are mostly rounding
        assert found == pytest.approx(min(ratios), rel=1e-3)


@given(forecasts(), st.floats(0, 1e5), st.floats(0, 1e3))
def test_an_aged_value_is_a_number_and_where_it_began_it_is_the_same(
    forecast: Forecast, age: float, value: float
) -> None:
    aged = Adaptive(60.0).aged(value, forecast, age)
    assert 0.0 <= aged < math.inf
    is_expected = forecast.cdf[-1] > 1e-6
    assert Adaptive(60.0).aged(value, forecast, 0.0) == pytest.approx(value * is_expected)


@pytest.mark.parametrize("share", [7e-33, 1e-6])
def test_a_pin_of_tools_that_hardly_ever_return_is_worth_nothing(share: float) -> None:
    """Eight tools in one turn that all but never return: 7e-33 that all of them do."""
    hardly = Forecast([share * (edge >= 1.0) for edge in EDGES])
    assert [Adaptive(60.0).aged(1.0, hardly, age) for age in (0.0, 5.0)] == [0.0, 0.0]
