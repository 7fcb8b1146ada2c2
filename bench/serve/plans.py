"""What programs will send: sizes and pauses drawn before a server runs, token ids on demand.

A plan holds no text. The ids of a turn follow from (seed, program, turn) alone, so that any
two arms send the same prompts, thousands of programs cost no memory before they run, and no two
turns share a block by accident.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One request. Tokens are counts; `pause_s` is the tool call before it, 0 for the first."""

    new_tokens: int  # appended to the context
    answer_tokens: int  # asked for: no fewer, no more
    pause_s: float = 0.0
    keep_tokens: int | None = None  # cut the context to this length first (compaction, fork)


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """One agent run."""

    name: str
    turns: tuple[TurnPlan, ...]
    shared_tokens: int = 0  # of its first turn: the beginning that all programs have in common

    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each turn."""
        lengths, context = [], 0
        for turn in self.turns:
            kept = context if turn.keep_tokens is None else min(context, turn.keep_tokens)
            lengths.append(kept + turn.new_tokens)
            context = lengths[-1] + turn.answer_tokens
        return lengths

    def live_tokens(self) -> int:
        """What it keeps alive at most: its longest context, the answer included."""
        answers = (turn.answer_tokens for turn in self.turns)
        return max(a + b for a, b in zip(self.prompt_lengths(), answers, strict=True))


@dataclass(frozen=True)
class Tokens:
    """Token ids out of `low` .. `high` - 1, drawn from the seed and who asks."""

    seed: int
    low: int = 1000
    high: int = 30_000
    shared: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def of_turn(self, program: ProgramPlan, index: int) -> list[int]:
        """What is new in a turn's prompt."""
        new_tokens = program.turns[index].new_tokens
        if index:
            return self._draw(f"{program.name}:{index}", new_tokens)
        head = self._shared(min(program.shared_tokens, new_tokens))
        return head + self._draw(program.name, new_tokens - len(head))

    def instead_of_answer(self, program: ProgramPlan, index: int) -> list[int]:
        """Ids for a server that does not say which ones it answered."""
        return self._draw(f"{program.name}:{index}:a", program.turns[index].answer_tokens)

    def _shared(self, num_tokens: int) -> list[int]:
        if len(self.shared) < num_tokens:
            self.shared[:] = self._draw("shared", num_tokens)
        return self.shared[:num_tokens]

    def _draw(self, what: str, num_tokens: int) -> list[int]:
        digest = hashlib.sha256(f"{self.seed}:{what}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        ids: list[int] = rng.integers(self.low, self.high, num_tokens).tolist()
        return ids
