"""The policies that adaptive is compared with, by hand-computed cases; the registry of all."""

from __future__ import annotations

import pytest

from continuum_connector.config import POLICIES
from continuum_connector.forecast import Forecast
from continuum_connector.policy.base import After, Choice, FinishedTurn, Free, Offload, Pin
from continuum_connector.policy.baselines import (
    MAKERS,
    LruOffload,
    ProgramOrder,
    Released,
    make_policy,
)
from continuum_connector.programs.program import Hints
from continuum_connector.toolcalls import Asked, Ending
from tests.unit.deciding import finished, world


def calling(*commands: str, gaps: tuple[float, ...] = ()) -> FinishedTurn:
    return finished(asked=Asked(Ending.CALLS, commands), tool_gaps=gaps, prefill_s=3.0)


# --- Continuum's released code ----------------------------------------------------------
@pytest.mark.parametrize(
    ("turn", "ttl_s", "why"),
    [
        (finished(), 0.0, "no tool call"),
        (finished(asked=Asked(Ending.ANSWER)), 0.0, "no tool call"),
        (calling("ls"), 2.0, "this tool's first call"),
        (calling("make", gaps=(0.5, 0.5, 5.0)), 2.0, "this tool takes 2 s on average"),
        (calling("make", gaps=(0.5, 0.5, 5.3)), 0.0, "this tool takes 2.1 s on average"),
    ],
)
def test_the_released_rule_pins_for_two_seconds_what_a_fast_tool_comes_back_for(
    turn: FinishedTurn, ttl_s: float, why: str
) -> None:
    decisions = {False: Pin(ttl_s), True: Pin(ttl_s, After.STORE)} if ttl_s else {}
    for has_tier, otherwise in {False: Free(), True: Offload()}.items():
        expected = Choice(decisions.get(has_tier, otherwise), why)
        assert Released(60.0).decide(turn, world(has_tier)) == expected


def test_the_released_rule_knows_its_own_two_seconds_and_no_wish_but_the_bound() -> None:
    asks = finished(hints=Hints(ttl_s=9.0), asked=Asked(Ending.CALLS, ("ls",)))
    assert make_policy("released", 30.0, 60.0).decide(asks, world()).decision == Pin(2.0)
    assert Released(1.0).decide(calling("ls", gaps=(1.5,)), world()).decision == Pin(1.0)
    assert Released(0.0).decide(calling("ls"), world()).decision == Free()


# --- the others ------------------------------------------------------------------------
def test_program_order_keeps_nothing() -> None:
    choice = ProgramOrder().decide(finished(prefill_s=9.0), world(True))
    assert choice == Choice(Free(), "policy is program_order")
    assert ProgramOrder().orders


@pytest.mark.parametrize(
    "turn", [finished(), finished(hints=Hints(final=True)), finished(aborted=True)]
)
def test_lru_offload_stores_whatever_was_computed(turn: FinishedTurn) -> None:
    assert LruOffload().decide(turn, world(True)).decision == Offload()
    assert LruOffload().decide(turn, world()) == Choice(Free(), "there is no DRAM tier")
    assert LruOffload().decide(finished(0), world(True)).decision == Free()


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"lru_offload"}))
def test_what_will_not_be_read_again_is_kept_by_none(name: str) -> None:
    known = {"gap": Forecast.known(1.0), "prefill_s": 9.0, "load_s": 0.1}
    policy = make_policy(name, 2.0, 60.0)
    for turn in (
        finished(hints=Hints(final=True), **known),
        finished(aborted=True, **known),
        finished(0, **known),
    ):
        assert policy.decide(turn, world(True)).decision == Free()


def test_the_config_names_every_policy() -> None:
    assert set(POLICIES) == set(MAKERS)


def test_only_those_that_claim_to_change_the_order_of_vllm() -> None:
    stays = {name for name in POLICIES if not make_policy(name, 2.0, 60.0).orders}
    assert stays == {"stock", "lru_offload"}
