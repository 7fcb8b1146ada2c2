"""Other papers' rules, which the lab has, by hand-computed cases."""

from __future__ import annotations

import math

import pytest

from bench.sim.policies import ContextServe, Infercept, return_quantile, student_quantile
from continuum_connector.forecast.forecast import Forecast
from continuum_connector.policy.base import After, Choice, FinishedTurn, Free, Offload, Pin
from continuum_connector.toolcalls.asked import Asked, Ending
from tests.unit.deciding import finished, world


# --- InferCept -------------------------------------------------------------------------
# 10 blocks, beside 390 of others: 1000 - 500 free - 100 pinned = 400 in use
@pytest.mark.parametrize(
    ("gap_s", "prefill_s", "load_s", "wasted"),
    [
        # preserve: gap * 10; swap: 2 * load * 10; discard: prefill * 400
        (1.0, 1.0, 1.0, {"pin": 10, "offload": 20, "free": 400}),
        (9.5, 1.0, 1.0, {"pin": 95, "offload": 20, "free": 400}),
        (9.5, 0.04, 1.0, {"pin": 95, "offload": 20, "free": 16}),
    ],
    ids=["preserve", "swap", "discard"],
)
def test_infercept_takes_what_wastes_least(
    gap_s: float, prefill_s: float, load_s: float, wasted: dict[str, float]
) -> None:
    turn = finished(gap=Forecast.known(gap_s), prefill_s=prefill_s, load_s=load_s)
    choice = Infercept(60.0).decide(turn, world(has_tier=True))
    least = min(wasted, key=wasted.__getitem__)
    assert choice.decision == {"pin": Pin(60.0), "offload": Offload(), "free": Free()}[least]
    average = 10.0
    expected = {name: (wasted["free"] - waste) / average for name, waste in wasted.items()}
    assert choice.values == pytest.approx(expected, rel=0.1)  # the forecast's grid
    assert choice.why.startswith("least waste in block-seconds: free ")


def test_infercept_does_not_see_the_queue() -> None:
    turn = finished(gap=Forecast.known(9.5), prefill_s=1.0, load_s=0.1)
    choices = [Infercept(60.0).decide(turn, world(True, queueing_s=q)) for q in (0.0, 1e3)]
    assert choices[0] == choices[1]
    assert choices[0].decision == Offload()


def test_infercept_without_a_tier_preserves_or_discards() -> None:
    turn = finished(gap=Forecast.known(9.5), prefill_s=1.0)
    assert Infercept(60.0).decide(turn, world()).decision == Pin(60.0)
    turn = finished(gap=Forecast.known(9.5), prefill_s=0.1)
    assert Infercept(60.0).decide(turn, world()).decision == Free()


# --- ContextServe ----------------------------------------------------------------------
def calling(*commands: str, gaps: tuple[float, ...] = ()) -> FinishedTurn:
    return finished(asked=Asked(Ending.CALLS, commands), tool_gaps=gaps, prefill_s=math.e)


@pytest.mark.parametrize(
    ("turn", "choice"),
    [
        (calling("ls"), Choice(Pin(3.0), "a fast tool")),
        (calling("ls", "cat"), Choice(Pin(3.0), "a fast tool")),
        (calling("pip"), Choice(Free(), "a slow tool")),
        (calling("ls", "pytest"), Choice(Free(), "a slow tool")),
    ],
)
def test_contextserve_knows_some_tools_by_name(turn: FinishedTurn, choice: Choice) -> None:
    assert ContextServe(60.0).decide(turn, world()) == choice


@pytest.mark.parametrize("command", ["lsof", "python"])
def test_contextserve_asks_the_posterior_about_others(command: str) -> None:
    choice = ContextServe(60.0).decide(calling(command, gaps=(4.0,) * 1000), world())
    assert isinstance(choice.decision, Pin)
    assert 4.0 < choice.decision.ttl_s < 5.2
    assert choice.why.startswith("90% of its calls are expected back within ")


def test_contextserve_lets_go_of_a_tool_that_takes_longer_than_any_pin() -> None:
    turn = calling("python", gaps=(100.0,) * 1000)
    assert ContextServe(60.0).decide(turn, world(True)).decision == Offload()
    assert ContextServe(60.0).decide(turn, world()).decision == Free()


def test_contextserve_falls_back_to_continuum_where_nothing_is_known() -> None:
    choice = ContextServe(60.0).decide(calling("python"), world())
    assert choice.decision == Pin(pytest.approx(1.0))
    assert choice.why.startswith("cold start")


def test_contextserve_pins_within_the_bound_and_stores_meanwhile() -> None:
    decision = ContextServe(2.0).decide(calling("ls"), world(True)).decision
    assert decision == Pin(2.0, After.STORE)


def test_the_posterior_by_hand() -> None:
    """Prior mu 0, kappa 1, alpha 2, beta 1; gaps of e and e^3 seconds, so logs 1 and 3.

    kappa 3, alpha 3, mu 4/3, beta 1 + 1 + 1 * 2 * 4 / (2 * 3) = 10/3, and so a width of
    sqrt(10/3 * 4 / (3 * 3)) = 1.2172; t(0.9; 6 degrees) = 1.440.
    """
    expected = math.exp(4 / 3 + 1.2172 * 1.440)
    assert return_quantile([math.e, math.e**3], 0.9) == pytest.approx(expected, rel=0.005)
    # Nothing seen: width sqrt(1 * 2 / 2) = 1, t(0.9; 4 degrees) = 1.533
    assert return_quantile([], 0.9) == pytest.approx(math.exp(1.533), rel=0.01)


@pytest.mark.parametrize(
    ("q", "degrees", "expected"),  # from the usual tables
    [(0.5, 4, 0.0), (0.9, 4, 1.533), (0.9, 10, 1.372), (0.95, 4, 2.132), (0.8, 6, 0.906)],
)
def test_students_t(q: float, degrees: float, expected: float) -> None:
    assert student_quantile(q, degrees) == pytest.approx(expected, rel=0.005, abs=1e-9)
