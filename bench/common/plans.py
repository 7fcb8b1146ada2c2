"""A plan: who asks what, when, and how the model answers; played in the lab and on real servers.

A plan holds no text. In the lab equal spans are equal tokens; real servers are sent ids drawn for
each program (serve/token_ids.py), or `text`, and what they answer takes the place of the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

STREAM = 1 << 24  # token ids of one stream; streams never overlap


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `start + length` of a stream; equal spans are equal text."""

    stream: int
    length: int
    start: int = 0

    def tokens(self) -> range:
        first = self.stream * STREAM + self.start
        return range(first, first + self.length)


@dataclass(frozen=True)
class TurnPlan:
    """One request and its answer.

    `gap_s`: from the end of what it waits for (the program's turn before, and the programs named
    in `joins`) to its arrival, which is not before `at_s`. `tool`: what its answer calls, "" if it
    calls none; a program's next turn then comes after that tool. `is_final`: the program's last.
    `text`: what is new in the prompt, where it is sent as words.
    """

    prompt: tuple[Span, ...]
    answer: Span
    gap_s: float = 0.0
    tool: str = ""
    is_final: bool = False
    joins: tuple[str, ...] = ()
    at_s: float = 0.0
    text: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.length for span in self.prompt)

    def tokens(self, before: TurnPlan | None = None, known: Sequence[int] = ()) -> list[int]:
        """The prompt's token ids; `known` are those of the turn `before`, which cost nothing."""
        num_known = num_common(self.prompt, before.prompt) if before is not None else 0
        found, position = list(known[:num_known]), 0
        for span in self.prompt:
            found += span.tokens()[max(0, num_known - position) :]
            position += span.length
        return found

    @property
    def said(self) -> tuple[Span, ...]:
        """Prompt and answer; one span where the answer goes on with the prompt's last."""
        *before, last = self.prompt
        if (self.answer.stream, self.answer.start) == (last.stream, last.start + last.length):
            return (*before, replace(last, length=last.length + self.answer.length))
        return (*self.prompt, self.answer)


def num_common(first: Sequence[Span], second: Sequence[Span]) -> int:
    """How many tokens both begin with, at least."""
    number = 0
    for one, other in zip(first, second, strict=False):
        if (one.stream, one.start) != (other.stream, other.start):
            break
        number += min(one.length, other.length)
        if one.length != other.length:
            break
    return number


@dataclass(frozen=True)
class ProgramPlan:
    """One program. It begins at `arrival_s`, or `arrival_s` after the end of turn `after[1]` of
    program `after[0]`. `says_final`: whether it tells the server which turn is its last;
    `says_tools`: whether the server knows which tools it called; `says_program`: whether it names
    itself at all."""

    name: str
    turns: tuple[TurnPlan, ...]
    arrival_s: float = 0.0
    after: tuple[str, int] | None = None
    parent: str = ""
    says_final: bool = True
    says_tools: bool = True
    says_program: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of its longest turn, the answer included."""
        return max(turn.num_prompt_tokens + turn.answer.length for turn in self.turns)

    def num_kept(self, index: int) -> int:
        """Of all that was said before a turn, the tokens with which its prompt begins."""
        if not index:
            return 0
        return num_common(self.turns[index].prompt, self.turns[index - 1].said)

    def num_new(self, index: int) -> int:
        """Tokens that a turn's prompt adds to them."""
        return self.turns[index].num_prompt_tokens - self.num_kept(index)


@dataclass(frozen=True)
class Workload:
    """Programs, and where they come from. `note`: what was scaled or made up."""

    name: str
    programs: tuple[ProgramPlan, ...]
    note: str = ""

    @property
    def num_tokens(self) -> int:
        """Of the longest turn."""
        return max(program.num_tokens for program in self.programs)


class Streams:
    """Hands out stream numbers, each once."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def new(self) -> int:
        return next(self._count)


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


class Added(NamedTuple):
    """What a turn adds to its program's context, and how long after the turn before it comes."""

    num_new: int
    num_answer: int
    gap_s: float = 0.0


def grown(name: str, added: Iterable[Added], shared: int = 0) -> ProgramPlan:
    """A program whose context only grows; `shared`: tokens of its first prompt that all programs
    begin with, all but one at most."""
    first, *later = added
    streams = Streams()
    talk = Talk(streams, (Span(streams.new(), min(shared, first.num_new - 1)),))
    talk.turn(first.num_new - talk.num_tokens, first.num_answer)
    for each in later:
        talk.turn(each.num_new, each.num_answer, each.gap_s)
    return ProgramPlan(name, talk.turns())
