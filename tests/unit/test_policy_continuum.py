"""Continuum's rule: hand-computed cases, and Equation 2 by brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_connector.policy.base import After, FinishedTurn, Free, Offload, Pin, Snapshot
from continuum_connector.policy.baselines import Continuum, K, best_ttl, default_ttl
from tests.unit.deciding import finished, world

# 101 calls: 60 take 0.5 s, 30 take 2 s, 11 take 30 s
CALLS = [0.5] * 60 + [2.0] * 30 + [30.0] * 11
gaps = st.lists(
    st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 100)), min_size=1, max_size=200
).map(sorted)


def ttl(turn: FinishedTurn, snapshot: Snapshot, max_ttl_s: float = 1000.0) -> float:
    decision = Continuum(max_ttl_s).decide(turn, snapshot).decision
    return decision.ttl_s if isinstance(decision, Pin) else 0.0


def known(tool: list[float], every: list[float] | None = None, **more: Any) -> FinishedTurn:
    return finished(tool_gaps=tool, all_gaps=tool if every is None else every, **more)


@pytest.mark.parametrize(
    ("prefill_s", "expected"),
    [
        # tau = 0.5: 60/101 R - 0.5; tau = 2: 90/101 R - 2; tau = 30: R - 30
        (0.8, 0.0),  # 0.5 gains -0.02, 2 gains -1.29
        (1.0, 0.5),  # 0.5 gains 0.09
        (5.0, 0.5),  # 2.47 against 2.455
        (5.1, 2.0),  # 2.530 against 2.545
        (100.0, 2.0),  # 87.1 against 70
        (300.0, 30.0),  # 265.3 against 270
    ],
)
def test_the_ttl_is_the_recorded_gap_that_gains_most(prefill_s: float, expected: float) -> None:
    assert ttl(known(CALLS, prefill_s=prefill_s), world()) == expected


def test_the_gain_is_reported_per_average_turn_times_the_room_taken() -> None:
    choice = Continuum(60.0).decide(known(CALLS, num_blocks=30, prefill_s=5.1), world())
    assert choice.decision == Pin(2.0, After.DROP)
    assert choice.values == {"pin": pytest.approx(3 * (90 / 101 * 5.1 - 2)), "free": 0.0}
    assert choice.why == "101 calls of this tool known, 5.1 s saved by a return in time: TTL 2 s"


def test_queueing_counts_as_far_as_the_workload_is_memoryful() -> None:
    turn = known(CALLS, prefill_s=0.1)
    assert ttl(turn, world(queueing_s=5.0, eta=1.0)) == 2.0  # R = 5.1
    assert ttl(turn, world(queueing_s=5.0, eta=0.5)) == 0.5  # R = 2.6
    assert ttl(turn, world(queueing_s=5.0, eta=0.0)) == 0.0  # R = 0.1
    assert ttl(turn, world(queueing_s=5.0, eta=-1.0)) == 0.0  # R = -4.9


def test_the_reload_is_the_load_where_there_is_a_tier_even_if_prefill_were_faster() -> None:
    turn = known(CALLS, prefill_s=0.1, load_s=5.1)
    assert Continuum(60.0).decide(turn, world(has_tier=True)).decision == Pin(2.0, After.STORE)
    turn = known(CALLS, prefill_s=100.0, load_s=0.1)
    assert Continuum(60.0).decide(turn, world(has_tier=True)).decision == Offload()


def test_a_ttl_of_nothing_frees_without_a_tier() -> None:
    assert Continuum(60.0).decide(known(CALLS, prefill_s=0.1), world()).decision == Free()


def test_a_tool_speaks_for_itself_from_101_calls_on() -> None:
    slow = [9.0] * (K + 1)
    every = sorted([0.5] * 1000 + slow)
    assert ttl(known(slow, every, prefill_s=10.0), world()) == 9.0
    assert ttl(known(slow[:K], every, prefill_s=10.0), world()) == 0.5


def test_all_tools_together_speak_from_101_calls_on_before_that_the_default_does() -> None:
    turn = known([], [0.5] * (K + 1), prefill_s=10.0)
    assert ttl(turn, world()) == 0.5
    turn = known([0.5] * K, [0.5] * K, prefill_s=10.0)
    assert ttl(turn, world()) == pytest.approx(math.log(10.0))


def test_the_default_assumes_a_memoryful_workload_and_no_queue_at_first() -> None:
    turn = finished(prefill_s=math.e)
    assert ttl(turn, world(eta=-1.0)) == pytest.approx(1.0)
    assert ttl(turn, world(eta=-1.0, queueing_s=math.e**2 - math.e)) == pytest.approx(2.0)
    assert ttl(finished(prefill_s=1.0), world()) == 0.0
    assert ttl(finished(prefill_s=math.e**3), world(), max_ttl_s=2.0) == 2.0


@given(st.floats(0, 1e4))
def test_the_default_is_the_optimum_for_gaps_of_one_second_on_average(reward: float) -> None:
    def gain(t: float) -> float:
        return (1 - math.exp(-t)) * reward - t

    best = gain(default_ttl(reward))
    assert all(gain(i / 100) <= best + 1e-9 * max(1.0, reward) for i in range(2000))


@given(gaps, st.floats(-10, 1000), st.floats(0, 120))
def test_equation_2_by_brute_force(gaps: list[float], reward: float, max_ttl_s: float) -> None:
    def gain(ttl_s: float) -> float:
        return sum(gap <= ttl_s for gap in gaps) / len(gaps) * reward - ttl_s

    best, best_gain = best_ttl(gaps, reward, max_ttl_s)
    candidates = [0.0, *(gap for gap in gaps if gap <= max_ttl_s)]
    assert best in candidates
    assert gain(best) == pytest.approx(max(map(gain, candidates)), abs=1e-9)
    assert best_gain == pytest.approx(max(0.0, gain(best)), abs=1e-9)


@given(gaps, st.floats(0, 100), st.floats(0, 100), st.floats(0, 60))
def test_the_ttl_never_passes_its_bound_and_grows_with_what_is_saved(
    gaps: list[float], low: float, high: float, max_ttl_s: float
) -> None:
    low, high = sorted((low, high))
    assert best_ttl(gaps, low, max_ttl_s)[0] <= best_ttl(gaps, high, max_ttl_s)[0] <= max_ttl_s
