"""Forecast: a distribution of gaps on a grid, and the integrals that policies take of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.forecast import EDGES, Forecast


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """Any distribution, with any share that never returns."""
    weights = draw(st.lists(st.floats(0, 1), min_size=len(EDGES), max_size=len(EDGES)))
    share = draw(st.floats(0, 1)) / max(sum(weights), 1e-9)
    total, cdf = 0.0, []
    for weight in weights:
        total += weight * share
        cdf.append(min(total, 1.0))
    return Forecast(cdf, 10.0)


@given(forecasts(), st.floats(0, 2e5), st.floats(0, 2e5))
def test_it_never_falls_and_held_is_its_integral(f: Forecast, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0.0 <= f.within(low) <= f.within(high) <= 1.0
    assert 0.0 <= f.held(low) <= f.held(high) <= high + 1e-6
    # The mean of 1 - cdf between the two lies between its ends.
    held = f.held(high) - f.held(low)
    assert (1 - f.within(high)) * (high - low) <= held + 1e-6
    assert held <= (1 - f.within(low)) * (high - low) + 1e-6


def test_who_knows_the_gap_is_sure_from_there_on() -> None:
    known = Forecast.known(3.0)
    assert known.within(2.3) == 0.0
    assert known.within(3.5) == 1.0
    assert known.held(100.0) == pytest.approx(3.0, rel=0.2)
    assert 2.3 < known.quantile(0.5) < 3.5


def test_never_is_never() -> None:
    never = Forecast.never()
    assert never.within(1e9) == 0.0
    assert never.held(1e6) == pytest.approx(1e6)
    assert never.quantile(0.01) == math.inf


def test_the_longest_of_two_returns_when_both_have() -> None:
    both = Forecast.longest([Forecast.known(1.0), Forecast.known(10.0)])
    assert both.cdf == Forecast.known(10.0).cdf
    assert Forecast.longest([Forecast.known(1.0), Forecast.never()]).cdf == Forecast.never().cdf


def test_a_quantile_is_where_the_share_is_reached() -> None:
    rising = Forecast([min(1.0, edge / 10.0) for edge in EDGES])
    for q in (0.1, 0.5, 0.9):
        assert rising.within(rising.quantile(q)) == pytest.approx(q)


def test_a_cdf_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 values for 91 edges"):
        Forecast([0.0, 0.5, 1.0])
