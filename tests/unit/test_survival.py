"""Survival: counts of gaps, open ones too, and what they lean on while they are few."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.forecast import EDGES, HALF_LIFE, Forecast, Survival

NEVER = [1.0] * len(EDGES)  # a parent that says nothing returns
NUM_SLOW = 400

gaps = st.tuples(st.floats(0, 3e5), st.booleans())


def forecast(counts: Survival, parent: list[float] = NEVER, weight: float = 0.0) -> Forecast:
    return Forecast([1.0 - p for p in counts.shrunk(parent, weight)])


def counted(*values: float) -> Survival:
    counts = Survival()
    for value in values:
        counts.add(value)
    return counts


@settings(max_examples=60)
@given(
    st.lists(gaps, max_size=60),
    st.floats(0, 10),
    st.lists(st.floats(0, 1), min_size=91, max_size=91),
)
def test_a_curve_never_rises_and_stays_within_0_and_1(
    observed: list[tuple[float, bool]], weight: float, parent: list[float]
) -> None:
    counts = Survival()
    for gap_s, is_over in observed:
        counts.add(gap_s, is_over)
    curve = counts.shrunk(sorted(parent, reverse=True), weight)
    assert all(0.0 <= low <= high <= 1.0 for high, low in pairwise((1.0, *curve)))


@settings(max_examples=60)
@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=30), st.floats(0.1, 10))
def test_without_open_gaps_it_is_the_weighted_mean_of_observed_and_parent(
    values: list[float], weight: float
) -> None:
    parent = [0.9 - 0.8 * i / len(EDGES) for i in range(len(EDGES))]
    ages = range(len(values) - 1, -1, -1)
    weights = [2.0 ** (-age / HALF_LIFE) for age in ages]
    curve = counted(*values).shrunk(parent, weight)
    for edge, p, q in zip(EDGES, curve, parent, strict=True):
        longer = sum(w for w, v in zip(weights, values, strict=True) if v > edge)
        assert p == pytest.approx((longer + weight * q) / (sum(weights) + weight), abs=1e-9)


@settings(max_examples=60)
@given(st.lists(gaps, max_size=20), st.randoms())
def test_order_does_not_matter_but_for_forgetting(
    observed: list[tuple[float, bool]], rng: random.Random
) -> None:
    shuffled = list(observed)
    rng.shuffle(shuffled)
    curves = []
    for each in (observed, shuffled):
        counts = Survival()
        for gap_s, is_over in each:
            counts.add(gap_s, is_over)
        curves.append(counts.shrunk([0.5] * len(EDGES), 4.0))
    # 20 observations: the first weighs 6 % less than the last
    assert curves[0] == pytest.approx(curves[1], abs=0.04)


@settings(max_examples=60)
@given(st.lists(gaps, min_size=1, max_size=20), st.data())
def test_a_gap_observed_in_pieces_counts_as_one(
    observed: list[tuple[float, bool]], data: st.DataObject
) -> None:
    whole, pieces = Survival(), Survival()
    for gap_s, is_over in observed:
        whole.add(gap_s, is_over)
        cut = data.draw(st.sampled_from(EDGES))
        if cut < gap_s:
            pieces.add(cut, is_over=False)
            pieces.add(gap_s, is_over, after_s=cut)
        else:
            pieces.add(gap_s, is_over)
    assert pieces.num_seen == pytest.approx(whole.num_seen)
    assert pieces.shrunk(NEVER, 1.0) == pytest.approx(whole.shrunk(NEVER, 1.0), abs=1e-6)


def test_an_open_gap_says_only_that_it_is_longer() -> None:
    """Kaplan and Meier by hand: 1 s; open at 3 s; 5 s; 9 s -> 3/4, 3/4 * 1/2, 0."""
    counts = Survival()
    counts.add(1.0)
    counts.add(3.0, is_over=False)
    counts.add(5.0)
    counts.add(9.0)
    f = forecast(counts)
    slack = 0.005  # the first weighs 1 % less than the last
    assert f.within(2.0) == pytest.approx(1 / 4, abs=slack)
    assert f.within(7.0) == pytest.approx(5 / 8, abs=slack)
    assert f.within(20.0) == 1.0


def test_an_open_gap_says_nothing_about_the_bin_it_is_in() -> None:
    within = (EDGES[30] + EDGES[31]) / 2
    counts = Survival()
    counts.add(within, is_over=False)
    counts.add(within)
    assert forecast(counts).within(EDGES[31]) == 1.0


def test_if_half_never_return_the_curve_ends_at_one_half() -> None:
    """Whatever the ages at which they are given up, as long as others lasted less."""
    rng = random.Random(1)
    counts = Survival()
    for _ in range(2 * NUM_SLOW):
        if rng.random() < 0.5:
            counts.add(rng.expovariate(1.0))
        else:
            counts.add(rng.uniform(30.0, 90.0), is_over=False)
    assert forecast(counts).within(20.0) == pytest.approx(0.5, abs=0.05)
    assert forecast(counts).within(1e9) == pytest.approx(0.5, abs=0.05)


def test_giving_up_early_at_random_does_not_bias_the_curve() -> None:
    rng = random.Random(2)
    counts = Survival()
    for _ in range(2 * NUM_SLOW):
        gap_s, patience = rng.expovariate(0.1), rng.expovariate(0.05)
        counts.add(min(gap_s, patience), is_over=gap_s <= patience)
    # exponential with a mean of 10 s, though the mean of what was seen to end is 6.7 s
    assert forecast(counts).quantile(0.5) == pytest.approx(6.93, rel=0.15)


def test_what_is_longer_than_the_grid_has_not_returned() -> None:
    assert forecast(counted(1.0, 1e6)).within(1e9) == pytest.approx(0.5, abs=0.01)


def test_numbers_stay_small_however_many_gaps() -> None:
    counts, late = Survival(), Survival()
    for _ in range(50 * HALF_LIFE):
        counts.add(1.0)
    assert counts.num_seen == pytest.approx(1.443 * HALF_LIFE, rel=0.01)
    assert counts._unit < 2e6
    assert counts._total < 1e9
    for _ in range(HALF_LIFE):
        counts.add(100.0)
        late.add(100.0)
    assert forecast(counts).within(2.0) == pytest.approx(0.5, abs=0.01)
