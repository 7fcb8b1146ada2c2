"""A turn's tokens, whether they are written out or taken over from the turn before."""

from __future__ import annotations

import pytest

from bench.common.plans import Span, TurnPlan
from bench.sim.workloads.registry import WORKLOADS, at_rate

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
