"""What the agents will say and how long their tools take: drawn once, from a seed.

Everything is decided here, before a server runs, so that two arms get the same words, the
same arrivals and the same pauses. The words are the tiny tokenizer's: one word, one token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.serve.tokenizer import words


@dataclass(frozen=True)
class TurnPlan:
    """One request: what is new in it, how much is answered, and the pause before it."""

    role: str  # "user" for the task, "tool" for what a tool returned
    text: str
    max_tokens: int
    pause_s: float  # the tool call before this turn; 0 for the first


@dataclass(frozen=True)
class ProgramPlan:
    """One agent run."""

    name: str
    arrival_s: float
    turns: tuple[TurnPlan, ...]

    def final_tokens(self) -> int:
        """Length of its context at the end."""
        return sum(len(t.text.split()) + t.max_tokens for t in self.turns)


@dataclass(frozen=True)
class Workload:
    """Sizes in tokens, times in seconds; the ranges are drawn from evenly."""

    programs: int = 12
    turns: int = 6
    seed: int = 1
    arrivals_per_s: float = 1.0  # Poisson
    system_tokens: int = 96  # the same for all programs
    task_tokens: tuple[int, int] = (500, 900)
    tool_tokens: tuple[int, int] = (250, 450)
    answer_tokens: tuple[int, int] = (16, 40)
    pause_median_s: float = 0.9
    pause_sigma: float = 0.4  # lognormal: most between 0.5 and 1.5 s, few beyond 2 s
    pause_limits_s: tuple[float, float] = (0.3, 4.0)
    vocab: int = 2048

    def plan(self) -> list[ProgramPlan]:
        """Draw the programs, in order of arrival."""
        rng = random.Random(self.seed)
        vocabulary = words(self.vocab)
        system = _text(rng, vocabulary, self.system_tokens)
        plans, arrival = [], 0.0
        for number in range(self.programs):
            turns = [self._turn(rng, vocabulary, index) for index in range(self.turns)]
            turns[0] = _with_system(system, turns[0])
            plans.append(ProgramPlan(f"agent-{number:02d}", arrival, tuple(turns)))
            arrival += rng.expovariate(self.arrivals_per_s)
        return plans

    def _turn(self, rng: random.Random, vocabulary: list[str], index: int) -> TurnPlan:
        length = rng.randint(*(self.tool_tokens if index else self.task_tokens))
        pause = rng.lognormvariate(0.0, self.pause_sigma) * self.pause_median_s
        low, high = self.pause_limits_s
        return TurnPlan(
            role="tool" if index else "user",
            text=_text(rng, vocabulary, length),
            max_tokens=rng.randint(*self.answer_tokens),
            pause_s=min(max(pause, low), high) if index else 0.0,
        )


def _text(rng: random.Random, vocabulary: list[str], num_words: int) -> str:
    return "".join(" " + word for word in rng.choices(vocabulary, k=num_words))


def _with_system(system: str, turn: TurnPlan) -> TurnPlan:
    return TurnPlan(turn.role, system + turn.text, turn.max_tokens, turn.pause_s)
