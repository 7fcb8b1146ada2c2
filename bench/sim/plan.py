"""A workload as the lab plays it: who asks what, when, and how the model answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    prompt: tuple[Span, ...]
    answer: Span
    gap_s: float = 0.0
    tool: str = ""
    is_final: bool = False
    joins: tuple[str, ...] = ()
    at_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.length for span in self.prompt)

    def tokens(self, before: TurnPlan | None = None, known: Sequence[int] = ()) -> list[int]:
        """The prompt's token ids; `known` are those of the turn `before`, which cost nothing."""
        num_known = self._num_common(before) if before is not None else 0
        found, position = list(known[:num_known]), 0
        for span in self.prompt:
            found += span.tokens()[max(0, num_known - position) :]
            position += span.length
        return found

    def _num_common(self, other: TurnPlan) -> int:
        """How many tokens both prompts begin with, at least."""
        number = 0
        for mine, its in zip(self.prompt, other.prompt, strict=False):
            if (mine.stream, mine.start) != (its.stream, its.start):
                break
            number += min(mine.length, its.length)
            if mine.length != its.length:
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
