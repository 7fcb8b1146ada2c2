"""What a workload asks of a machine, the cells sized by it, and the tokens of its turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.common.plans import ProgramPlan, Span, TurnPlan, Workload
from bench.sim.hardware import machine
from bench.sim.load import Seen, demand, prefill_seconds, stretched
from bench.sim.workloads.registry import WORKLOADS, at_rate, build

H100 = machine("H100")


def turn(*prompt: Span, gap_s: float = 0.0, joins: tuple[str, ...] = ()) -> TurnPlan:
    """A turn of one token of answer, which goes on with the last span."""
    last = prompt[-1]
    return TurnPlan(prompt, Span(last.stream, 1, last.start + last.length), gap_s, joins=joins)


def test_text_is_known_where_all_before_it_is_known() -> None:
    seen = Seen()
    seen.add(turn(Span(1, 100), Span(2, 50)))
    assert seen.known(turn(Span(1, 100), Span(2, 80))) == 151  # the answer too
    assert seen.known(turn(Span(1, 60), Span(2, 50))) == 60
    assert seen.known(turn(Span(2, 50))) == 0
    assert seen.known(turn(Span(1, 100), Span(2, 30))) == 129  # the last is computed again


def test_a_second_turn_costs_only_what_is_new() -> None:
    first = turn(Span(1, 4_000))
    second = turn(Span(1, 5_000), gap_s=3.0)
    asked = demand(Workload("w", (ProgramPlan("p", (first, second)),)), H100)
    assert asked.work_s == pytest.approx(
        prefill_seconds(H100, first, 0) + prefill_seconds(H100, second, 4_001)
    )


def test_kv_is_live_from_a_program_s_first_turn_to_its_last_answer() -> None:
    away = turn(Span(1, 1_000)), turn(Span(1, 2_000), gap_s=60.0)
    other = (turn(Span(2, 500)),)
    plans = ProgramPlan("p", away), ProgramPlan("q", other, arrival_s=30.0)
    assert demand(Workload("w", plans), H100).live_tokens == 2_001
    later = plans[0], replace(plans[1], arrival_s=60.05)
    assert demand(Workload("w", later), H100).live_tokens == 2_001 + 501


def test_a_parent_s_kv_is_live_while_its_sub_agents_work() -> None:
    parent = ProgramPlan("p", (turn(Span(1, 1_000)), turn(Span(1, 1_200), joins=("c",))))
    child = ProgramPlan(
        "c",
        (turn(Span(2, 700)), turn(Span(2, 800), gap_s=9.0)),
        after=("p", 0),
        parent="p",
    )
    assert demand(Workload("w", (parent, child)), H100).live_tokens == 1_001 + 801


def test_a_window_half_as_long_doubles_what_is_live_and_not_the_work() -> None:
    workload = build("agents", {"programs": 200, "gaps": "coding"})
    slow, fast = (demand(stretched(workload, s), H100) for s in (2_000.0, 1_000.0))
    assert slow.work_s == pytest.approx(fast.work_s, rel=0.01)
    assert fast.live_tokens == pytest.approx(2 * slow.live_tokens, rel=0.35)


# --- a model with states ------------------------------------------------------------------
HYBRID = machine("H200", "qwen3-next-80b-fp8", kv_tokens=1 << 20)
MTP = machine("H200", "qwen3-next-80b-fp8-mtp", kv_tokens=1 << 20)


def test_a_model_with_states_knows_whole_blocks_and_an_mtp_layer_costs_one() -> None:
    first, second = turn(Span(1, 4_000)), turn(Span(1, 5_000), gap_s=3.0)
    workload = Workload("w", (ProgramPlan("p", (first, second)),))
    for on, known in ((HYBRID, 7 * 544), (MTP, 6 * 544)):
        assert demand(workload, on).work_s == pytest.approx(
            prefill_seconds(on, first, 0) + prefill_seconds(on, second, known)
        )


def test_a_context_takes_the_room_of_its_states_too() -> None:
    """A block per group with states, 544 tokens' worth each."""
    workload = Workload("w", (ProgramPlan("p", (turn(Span(1, 1_000)),)),))
    assert demand(workload, H100).live_tokens == 1_001
    assert demand(workload, HYBRID).live_tokens == 1_001 + 3 * 544


# --- a turn's tokens, written out or taken over from the turn before -------------------------
ANSWER = Span(9, 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_tokens_taken_over_are_the_ones_that_would_be_written(name: str) -> None:
    for program in at_rate(name, {"rate": 1.0}, 1).programs[:20]:
        before, known = None, []
        for turn in program.turns:
            known = turn.tokens(before, known)
            assert known == turn.tokens()
            before = turn


@pytest.mark.parametrize(
    "prompt",
    [
        (Span(1, 5), Span(2, 9)),  # goes on
        (Span(1, 3),),  # ends earlier
        (Span(1, 3), Span(2, 3)),  # leaves in the middle
        (Span(1, 5, start=1), Span(2, 3)),  # begins elsewhere
        (Span(3, 5), Span(1, 5)),  # says it later
        (),
    ],
)
def test_only_what_both_begin_with_is_taken_over(prompt: tuple[Span, ...]) -> None:
    before = TurnPlan((Span(1, 5), Span(2, 3)), ANSWER)
    turn = TurnPlan(prompt, ANSWER)
    assert turn.tokens(before, before.tokens()) == turn.tokens()
