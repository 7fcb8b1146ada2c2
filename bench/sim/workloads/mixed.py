"""Mixed: agents, people and single requests on one server."""

from __future__ import annotations

from dataclasses import replace

from bench.common.plans import ProgramPlan, Span, Streams, Talk, Workload
from bench.sim.workloads.shape import Shape

CHATS = 0.4  # of the programs are people's chats
CHAT_TURNS, CHAT_CONTEXT = 0.5, 0.3  # of an agent's turns and context
SINGLES = 0.2  # of the programs are single requests


def mixed(shape: Shape) -> Workload:
    """Agents with the shape's gaps, chats with people's, and single requests."""
    rng, streams = shape.rng("mixed"), Streams()
    system = Span(streams.new(), shape.shared)
    person = replace(shape, gaps="person")
    programs: list[ProgramPlan] = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        talk, kind = Talk(streams, (system,)), rng.random()
        turns, context = shape.about(rng, shape.turns), shape.about(rng, shape.context)
        if kind < CHATS:
            person.grow(talk, rng, max(1, round(turns * CHAT_TURNS)), round(context * CHAT_CONTEXT))
        elif kind < CHATS + SINGLES:
            shape.grow(talk, rng, 1, context)
        else:
            shape.grow(talk, rng, turns, context)
        programs.append(shape.program(f"mixed{index}", talk.turns(), arrival_s))
    return Workload("mixed", tuple(programs), shape.gap.note)
