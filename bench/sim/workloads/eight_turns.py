"""The published sweep's workload: eight turns, unique text, tools of half a second.

Its prompt lengths as measured there (table 1), 20 tokens per answer, Poisson arrivals of
`random.Random(seed).expovariate(rate)` for 45 s: 54, 133, 255, 433, 665 programs at 1, 3, 6, 10,
15 per second with seed 42.
"""

from __future__ import annotations

import random

from bench.sim.plan import ProgramPlan, Span, Streams, TurnPlan, Workload

PROMPTS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)  # tokens
ANSWER, WINDOW_S, TOOL_S = 20, 45.0, 0.5
SHARED = 80  # tokens of the first prompt that all programs have in common


def arrivals(rate: float, seed: int = 42, window_s: float = WINDOW_S) -> list[float]:
    """When programs arrive: Poisson, until `window_s`."""
    rng, times, now = random.Random(seed), [], 0.0
    while (now := now + rng.expovariate(rate)) < window_s:
        times.append(now)
    return times


def eight_turns(rate: float, seed: int = 42, tool_s: float = TOOL_S) -> Workload:
    """The workload at `rate` programs per second."""
    streams = Streams()
    system = Span(streams.new(), SHARED)
    programs = tuple(
        ProgramPlan(f"p{i}", _turns(system, streams, tool_s), arrived)
        for i, arrived in enumerate(arrivals(rate, seed))
    )
    return Workload(f"eight_turns rate={rate:g}", programs)


def _turns(system: Span, streams: Streams, tool_s: float) -> tuple[TurnPlan, ...]:
    own = streams.new()
    turns, position = [], 0
    for index, length in enumerate(PROMPTS):
        is_final = index == len(PROMPTS) - 1
        position = length - system.length
        turns.append(
            TurnPlan(
                (system, Span(own, position)),
                Span(own, ANSWER, start=position),
                gap_s=tool_s if index else 0.0,
                tool="" if is_final else "tool",
                is_final=is_final,
            )
        )
    return tuple(turns)
