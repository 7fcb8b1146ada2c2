"""Agents: programs of several turns, a tool between two; and traffic of single requests."""

from __future__ import annotations

from bench.common.plans import Span, Streams, Talk, Workload
from bench.sim.workloads.shape import Shape


def agents(shape: Shape) -> Workload:
    """Independent programs that have a system prompt in common."""
    rng, streams = shape.rng("agents"), Streams()
    system = Span(streams.new(), shape.shared)
    programs = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        talk = Talk(streams, (system,))
        shape.grow(talk, rng, shape.about(rng, shape.turns), shape.about(rng, shape.context))
        programs.append(shape.program(f"agent{index}", talk.turns(), arrival_s))
    return Workload("agents", tuple(programs), shape.gap.note)


def no_reuse(shape: Shape) -> Workload:
    """One turn each, no two with a token in common: nothing that could be kept is worth it."""
    rng, streams = shape.rng("no reuse"), Streams()
    programs = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        talk = Talk(streams)
        talk.turn(shape.about(rng, shape.context), shape.about(rng, shape.answer))
        programs.append(shape.program(f"single{index}", talk.turns(), arrival_s))
    return Workload("no_reuse", tuple(programs))
