"""Talk: one program's turns as they are written, each prompt the one before and more."""

from __future__ import annotations

from dataclasses import replace

from bench.sim.plan import Span, Streams, TurnPlan


class Talk:
    """Collects turns. `prefix`: text the program has in common with others, its own comes after.

    What is said is one stream: a prompt is all of it so far, an answer its next tokens.
    """

    def __init__(self, streams: Streams, prefix: tuple[Span, ...] = ()) -> None:
        self._streams, self._prefix = streams, tuple(span for span in prefix if span.length)
        self._own, self._length = streams.new(), 0
        self._turns: list[TurnPlan] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the next prompt if nothing is added to it."""
        return sum(span.length for span in self._prefix) + self._length

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turn(
        self,
        num_new: int,
        num_answer: int,
        gap_s: float = 0.0,
        tool: str = "",
        joins: tuple[str, ...] = (),
    ) -> None:
        """Ask with `num_new` tokens more, at least one, `gap_s` after the turn before; `tool`:
        what the answer calls."""
        self._length += max(1, num_new)
        prompt = (*self._prefix, Span(self._own, self._length))
        answer = Span(self._own, max(1, num_answer), start=self._length)
        self._length += answer.length
        self._turns.append(TurnPlan(prompt, answer, gap_s, tool, joins=joins))

    def forget(self, keep: int) -> None:
        """Go on with the first `keep` tokens only; what is said next is new text."""
        kept, left = [], keep
        for span in (*self._prefix, Span(self._own, self._length)):
            if left > 0 and span.length:
                kept.append(replace(span, length=min(span.length, left)))
                left -= span.length
        self._prefix, self._own, self._length = tuple(kept), self._streams.new(), 0

    def turns(self) -> tuple[TurnPlan, ...]:
        """Return what was said; the last turn is marked as such and calls nothing."""
        *rest, last = self._turns
        return (*rest, replace(last, tool="", is_final=True))
