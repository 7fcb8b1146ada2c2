"""What agents who chat will say and how long their tools take: drawn once, from a seed.

Everything is decided here, before a server runs, so that two arms get the same words, the
same arrivals and the same pauses. The words are the tiny tokenizer's: one word, one token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from bench.common.plans import ProgramPlan, Streams, Talk
from bench.serve.tokenizer import text, words


@dataclass(frozen=True)
class Agents:
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
        system = text(rng, vocabulary, self.system_tokens)
        plans, arrival = [], 0.0
        for number in range(self.programs):
            talk = Talk(Streams())
            texts = [
                self._turn(rng, vocabulary, talk, "" if index else system)
                for index in range(self.turns)
            ]
            turns = (replace(t, text=s) for t, s in zip(talk.turns(), texts, strict=True))
            plans.append(ProgramPlan(f"agent-{number:02d}", tuple(turns), arrival))
            arrival += rng.expovariate(self.arrivals_per_s)
        return plans

    def _turn(self, rng: random.Random, vocabulary: list[str], talk: Talk, before: str) -> str:
        """Add a turn to the talk; returns what it says."""
        length = rng.randint(*(self.tool_tokens if talk.num_turns else self.task_tokens))
        pause = rng.lognormvariate(0.0, self.pause_sigma) * self.pause_median_s
        low, high = self.pause_limits_s
        gap_s = min(max(pause, low), high) if talk.num_turns else 0.0
        said = before + text(rng, vocabulary, length)
        talk.turn(len(said.split()), rng.randint(*self.answer_tokens), gap_s)
        return said
