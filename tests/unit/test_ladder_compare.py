"""When the ladder calls two answers equal."""

from __future__ import annotations

import pytest

from tests.server.ladder.compare import BOUND, compare
from tests.server.ladder.player import Asked


def answer(*tokens: int, likely: list[dict[int, float]] | None = None) -> Asked:
    found = likely or [{token: -0.5} for token in tokens]
    return Asked("probe", {}, [list(tokens)], [found])


def test_an_exact_answer_is_equal_to_the_token() -> None:
    assert compare(answer(1, 2, 3), answer(1, 2, 3), is_exact=True).why == ""
    assert "token 1 is 2, not 4" in compare(answer(1, 2), answer(1, 4), is_exact=True).why
    assert "1 tokens, not 2" in compare(answer(1), answer(1, 2), is_exact=True).why


def test_rounded_answers_may_part_only_where_both_tokens_are_about_as_likely_to_both() -> None:
    ours = answer(1, 2, likely=[{1: -0.1}, {2: -1.0, 3: -1.1}])
    tie = answer(1, 3, likely=[{1: -0.2}, {3: -1.0, 2: -1.2}])
    assert compare(ours, tie, is_exact=True).why
    found = compare(ours, tie, is_exact=False)
    assert (found.why, found.num_parted) == ("", 1)
    assert found.largest == pytest.approx(0.2)
    sure = answer(1, 3, likely=[{1: -0.2}, {3: -0.1, 2: -0.1 - 2 * BOUND}])
    assert compare(ours, sure, is_exact=False).why
    alien = answer(1, 5, likely=[{1: -0.2}, {5: -1.0, 6: -1.0}])
    assert compare(ours, alien, is_exact=False).why


@pytest.mark.parametrize(
    ("temperature", "gap", "moved", "is_equal"),
    [
        (1e-3, 0.13, 0.0, True),  # vLLM draws at 0.01
        (1e-3, 0.15, 0.0, False),
        (0.1, 1.0, 0.0, True),
        (1e-3, 0.05, 0.02, False),
        (0, 0.0, 0.0, False),
    ],
)
def test_an_exact_answer_may_part_where_a_draw_may_take_either_token(
    temperature: float, gap: float, moved: float, is_equal: bool
) -> None:
    ours = answer(2, likely=[{2: -1.0, 3: -1.0 - gap}])
    ours.body["temperature"] = temperature
    theirs = answer(3, likely=[{2: -1.0, 3: -1.0 - gap + moved}])
    assert (compare(ours, theirs, is_exact=True).why == "") is is_equal


@pytest.mark.parametrize("logprob", [-0.5 - 2 * BOUND, float("nan")])
def test_equal_tokens_of_other_logprobs_are_not_equal(logprob: float) -> None:
    other = answer(1, 2, likely=[{1: -0.5}, {2: logprob}])
    assert compare(answer(1, 2), other, is_exact=False).why
    assert compare(other, answer(1, 2), is_exact=True).why


def test_a_choice_less_is_not_equal() -> None:
    two = Asked("probe", {}, [[1], [1]], [[{1: -0.5}], [{1: -0.5}]])
    assert compare(two, answer(1), is_exact=True).why
