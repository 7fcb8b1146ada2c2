"""The gap regimes of agents, scaled to what a CPU serves, and the workload around them.

A CPU computes prompts some hundred times slower than a GPU, so contexts are short here and gaps
are scaled down with them; what stays true is how gaps spread, and how they compare with the time
that a context takes to compute.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, replace

from bench.chat.plan import ProgramPlan, Workload
from bench.serve.tiny_model import LLAMA

PROGRAMS, TURNS, RATE = 8, 4, 2.0
SEEDS = range(1, 6)  # of the counted runs
WARM_UP = 0  # seed of the first run
LEARN = 36  # programs of the first run where the policy learns: 108 gaps
TASK, TOOL, ANSWER = (400, 700), (200, 350), (8, 20)  # tokens


@dataclass(frozen=True)
class Regime:
    """Gaps by their quantiles: `points` are (share back by then, seconds), log-linear between."""

    name: str
    what: str
    points: tuple[tuple[float, float], ...]

    def draw(self, rng: random.Random) -> float:
        """One gap, in seconds."""
        shares = [share for share, _ in self.points]
        q = rng.random()
        above = min(max(bisect_right(shares, q), 1), len(shares) - 1)
        (q0, low), (q1, high) = self.points[above - 1], self.points[above]
        return float(low * (high / low) ** ((q - q0) / (q1 - q0)))


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("fast", "0.5 s, little spread", ((0.0, 0.35), (0.5, 0.5), (1.0, 0.7))),
        # Real coding sessions: P10 4, P25 5, P50 9, P75 19, P90 72, P95 168 s.
        Regime(
            "coding",
            "coding sessions, 1/8: median 1.1 s, long tail",
            (
                (0.0, 0.4),
                (0.1, 0.5),
                (0.25, 0.63),
                (0.5, 1.1),
                (0.75, 2.4),
                (0.9, 9.0),
                (1.0, 15.0),
            ),
        ),
        # People: P10 16, P25 40, P50 127, P75 409 s.
        Regime(
            "person",
            "two minutes, 1/40: median 3.2 s",
            ((0.0, 0.3), (0.1, 0.4), (0.25, 1.0), (0.5, 3.2), (0.75, 10.2), (1.0, 15.0)),
        ),
    )
}


def plans(regime: Regime, seed: int, programs: int = PROGRAMS) -> list[ProgramPlan]:
    """The programs of one run: same words and arrivals in every regime, its own gaps."""
    work = Workload(programs, TURNS, seed, RATE, vocab=LLAMA.vocab)
    work = replace(work, task_tokens=TASK, tool_tokens=TOOL, answer_tokens=ANSWER)
    rng = random.Random(f"{regime.name} {seed}")
    return [_with_gaps(plan, regime, rng) for plan in work.plan()]


def _with_gaps(plan: ProgramPlan, regime: Regime, rng: random.Random) -> ProgramPlan:
    first, *later = plan.turns
    return replace(plan, turns=(first, *(replace(t, pause_s=regime.draw(rng)) for t in later)))


def live_tokens() -> float:
    """Tokens that all programs of a run hold together when each is half way, on average."""
    totals = [sum(p.final_tokens() for p in plans(REGIMES["fast"], seed)) / 2 for seed in SEEDS]
    return sum(totals) / len(totals)
