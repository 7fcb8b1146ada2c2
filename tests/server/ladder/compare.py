"""Is an answer the control's? In float32 it is so to the token; in bfloat16, where rounding
differs with how a prompt was split into batches, up to a token that was as likely as its rival.

The logprobs must agree as far as the tokens do, and where rounding parts them, both tokens must be
likely to both, within BOUND: a wrong state moves logprobs by whole units. Drawn answers may part
where both give both tokens the same logprobs, so near each other that a draw may take either.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.server.ladder.player import Asked

EXACT = 1e-2  # of logprobs in float32
BOUND = 0.5  # in bfloat16
LEAST = 0.01  # of temperatures, as vLLM draws
NEAR = 14.0  # temperatures between two logprobs: the other is drawn once in a million times


@dataclass
class Difference:
    """`largest`: of the logprobs of what both answered; `why`: what is wrong, "" if nothing."""

    largest: float = 0.0
    num_parted: int = 0
    why: str = ""


def compare(asked: Asked, control: Asked, is_exact: bool) -> Difference:
    found = Difference()
    if len(asked.choices) != len(control.choices):
        return Difference(why=f"{len(asked.choices)} choices, not {len(control.choices)}")
    for i in range(len(asked.choices)):
        _compare_choice(found, asked, control, i, is_exact)
    bound = EXACT if is_exact else BOUND
    if not found.why and not found.largest <= bound:
        found.why = f"logprobs differ by {found.largest:.3g}"
    return found


def _compare_choice(
    found: Difference, asked: Asked, control: Asked, choice: int, is_exact: bool
) -> None:
    ours, theirs = asked.choices[choice], control.choices[choice]
    pairs = zip(asked.likely[choice], control.likely[choice], strict=False)
    for place, (our, their) in enumerate(pairs):
        one, other = ours[place], theirs[place]
        if one == other:
            found.largest = _worse(found.largest, our[one] - their[one])
            continue
        found.num_parted += 1
        temperature = asked.body.get("temperature", 0)
        if one not in their or other not in our or (is_exact and not temperature):
            found.why = f"token {place} is {one}, not {other}"
        elif temperature:
            found.largest = _worse(found.largest, our[one] - their[one])
            found.largest = _worse(found.largest, our[other] - their[other])
            if abs(our[one] - our[other]) > NEAR * max(temperature, LEAST):
                found.why = f"token {place} is {one}, not {other}, which nobody would have drawn"
        else:
            found.largest = _worse(found.largest, their[other] - their[one])
            found.largest = _worse(found.largest, our[one] - our[other])
        return
    if len(ours) != len(theirs):
        found.why = f"{len(ours)} tokens, not {len(theirs)}"


def _worse(largest: float, difference: float) -> float:
    """No number is the worst."""
    return max(largest, abs(difference)) if difference == difference else float("inf")
