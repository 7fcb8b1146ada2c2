"""Shape: the sizes of made-up programs, and what their clients tell the server."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bench.common.plans import ProgramPlan, Talk, TurnPlan
from bench.sim.workloads.gaps import Gaps, gaps


@dataclass(frozen=True)
class Shape:
    """`programs`, `turns` (on average), `context`: tokens of a program's last turn (on average);
    `first`: share of it that the first prompt brings; `answer`: tokens (on average); `shared`:
    tokens of system prompt that all have in common. `gaps`, `gap_scale`, `longest_s`,
    `parallel`: gaps.py. Averages are means of uniform draws from half to one and a half."""

    programs: int = 40
    turns: int = 8
    context: int = 12_000
    first: float = 0.3
    answer: int = 24
    shared: int = 512
    gaps: str = "fast"
    gap_scale: float = 1.0
    longest_s: float = 300.0
    parallel: int = 1
    says_final: bool = True
    says_tools: bool = True
    says_program: bool = True
    seed: int = 1

    def rng(self, what: str) -> random.Random:
        """Random numbers of one kind of workload and this seed: the same in every process."""
        return random.Random(f"{what} {self.seed}")

    @property
    def gap(self) -> Gaps:
        return gaps(self.gaps, self.gap_scale, self.longest_s, self.parallel)

    @property
    def says(self) -> dict[str, Any]:
        """What clients tell, as arguments of ProgramPlan."""
        names = ("says_final", "says_tools", "says_program")
        return {name: getattr(self, name) for name in names}

    def arrivals(self, rng: random.Random, count: int | None = None) -> list[float]:
        """Moments of a second, as a Poisson process that is known to have this many has them;
        load.py stretches them to a load."""
        return sorted(rng.random() for _ in range(self.programs if count is None else count))

    def program(self, name: str, turns: tuple[TurnPlan, ...], arrival_s: float) -> ProgramPlan:
        return ProgramPlan(name, turns, arrival_s, **self.says)

    def about(self, rng: random.Random, mean: float) -> int:
        """An integer between half of `mean` and one and a half of it."""
        return max(1, round(mean * rng.uniform(0.5, 1.5)))

    def grow(
        self, talk: Talk, rng: random.Random, num_turns: int, context: int, gap_s: float = 0.0
    ) -> float:
        """Add turns, the first `gap_s` after what was there, until the talk is about `context`
        tokens long; steps are of uneven size, as tool results are. Returns the gap after it."""
        room = max(num_turns, context - talk.num_tokens)
        begin = round(room * self.first) if num_turns > 1 else room
        parts = [rng.expovariate(1.0) for _ in range(num_turns - 1)]
        for index in range(num_turns):
            part = begin if not index else round((room - begin) * parts[index - 1] / sum(parts))
            answer = self.about(rng, self.answer)
            next_gap_s, tool = self.gap.draw(rng)
            talk.turn(part - answer, answer, gap_s, tool)
            gap_s = next_gap_s
        return gap_s
