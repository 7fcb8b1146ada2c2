"""The gap regimes of agents, scaled to what a CPU serves, and the workload around them.

A CPU computes prompts some hundred times slower than a GPU, so contexts are short here and gaps
are scaled down with them; what stays true is how gaps spread, and how they compare with the time
that a context takes to compute.
"""

from __future__ import annotations

import random
from dataclasses import replace

from bench.chat.plan import Agents
from bench.common.plans import ProgramPlan
from bench.serve.tiny_model import LLAMA
from bench.sim.workloads.gaps import Curve

PROGRAMS, TURNS, RATE = 8, 4, 2.0
SEEDS = range(1, 6)  # of the counted runs
WARM_UP = 0  # seed of the first run
LEARN = 36  # programs of the first run where the policy learns: 108 gaps
TASK, TOOL, ANSWER = (400, 700), (200, 350), (8, 20)  # tokens


REGIMES = {
    regime.name: regime
    for regime in (
        Curve("fast", "0.5 s, little spread", ((0.0, 0.35), (0.5, 0.5), (1.0, 0.7))),
        # Real coding sessions: P10 4, P25 5, P50 9, P75 19, P90 72, P95 168 s.
        Curve(
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
        Curve(
            "person",
            "two minutes, 1/40: median 3.2 s",
            ((0.0, 0.3), (0.1, 0.4), (0.25, 1.0), (0.5, 3.2), (0.75, 10.2), (1.0, 15.0)),
        ),
    )
}


def plans(regime: Curve, seed: int, programs: int = PROGRAMS) -> list[ProgramPlan]:
    """The programs of one run: same words and arrivals in every regime, its own gaps."""
    work = Agents(programs, TURNS, seed, RATE, vocab=LLAMA.vocab)
    work = replace(work, task_tokens=TASK, tool_tokens=TOOL, answer_tokens=ANSWER)
    rng = random.Random(f"{regime.name} {seed}")
    return [_with_gaps(plan, regime, rng) for plan in work.plan()]


def _with_gaps(plan: ProgramPlan, regime: Curve, rng: random.Random) -> ProgramPlan:
    first, *later = plan.turns
    return replace(plan, turns=(first, *(replace(t, gap_s=regime.at(rng.random())) for t in later)))


def live_tokens() -> float:
    """Tokens that all programs of a run hold together when each is half way, on average."""
    totals = [sum(p.num_tokens for p in plans(REGIMES["fast"], seed)) / 2 for seed in SEEDS]
    return sum(totals) / len(totals)
