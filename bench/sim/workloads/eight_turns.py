"""The published sweep's workload: eight turns, unique text, tools of half a second."""

from __future__ import annotations

from bench.common.plans import ProgramPlan, Span, Streams, Talk, TurnPlan, Workload
from bench.common.workloads import SHARED, TOOL_S, TURNS, WINDOW_S, poisson


def eight_turns(
    rate: float, seed: int = 42, tool_s: float = TOOL_S, window_s: float = WINDOW_S
) -> Workload:
    """The workload at `rate` programs per second, which arrive for `window_s`."""
    streams = Streams()
    system = Span(streams.new(), SHARED)
    programs = tuple(
        ProgramPlan(f"p{i}", _turns(system, streams, tool_s), arrived)
        for i, arrived in enumerate(poisson(rate, window_s, seed))
    )
    return Workload(f"eight_turns rate={rate:g}", programs)


def _turns(system: Span, streams: Streams, tool_s: float) -> tuple[TurnPlan, ...]:
    first, *later = TURNS
    talk = Talk(streams, (system,))
    talk.turn(first.num_new - SHARED, first.num_answer, tool="tool")
    for each in later:
        talk.turn(each.num_new, each.num_answer, tool_s, "tool")
    return talk.turns()
