"""Seen: all text said so far. How much of a prompt would a perfect memory have?"""

from __future__ import annotations

from bench.common.plans import Span, TurnPlan


class Seen:
    """Remembers prompts and answers, which are equal where the spans before them are.

    `unit`: tokens that are known all or none; `num_dropped`: units at the end of what is known
    that are computed again all the same.
    """

    def __init__(self, unit: int = 1, num_dropped: int = 0) -> None:
        self._unit, self._num_dropped = unit, num_dropped
        self._lengths: dict[tuple[tuple[Span, ...], int, int], int] = {}

    def known(self, turn: TurnPlan) -> int:
        """Tokens of the turn's prompt that were said before, at least one less than all of it:
        vLLM computes the last one again."""
        known, before = 0, tuple[Span, ...]()
        for span in turn.prompt:
            length = self._lengths.get((before, span.stream, span.start), 0)
            known += min(length, span.length)
            if length < span.length:
                break
            before = (*before, span)
        num_units = min(known, turn.num_prompt_tokens - 1) // self._unit
        return max(0, num_units - self._num_dropped) * self._unit

    def add(self, turn: TurnPlan) -> None:
        """Remember a turn's prompt and, where it goes on with it, its answer."""
        before = tuple[Span, ...]()
        for span in turn.prompt:
            key = (before, span.stream, span.start)
            end, length = span.start + span.length, span.length
            if turn.answer.stream == span.stream and turn.answer.start == end:
                length += turn.answer.length
            self._lengths[key] = max(self._lengths.get(key, 0), length)
            before = (*before, span)
