"""What the lab makes up: agents, people, single requests; programs that share a long beginning,
summarise themselves, or send out others; and the published sweep's, which was made up there."""

from __future__ import annotations

import random
from dataclasses import replace

from bench.common.plans import ProgramPlan, Span, Streams, Talk, TurnPlan, Workload
from bench.common.workloads import SHARED, TOOL_S, TURNS, WINDOW_S, poisson
from bench.sim.workloads.shape import Shape

FORKS = 4  # programs that share a beginning
FORKED = 0.5  # share of the context that they have in common
SUMMARY = 0.15  # of the context is what a compaction leaves
SUBAGENTS = 3  # sent out at once
SUB_CONTEXT = 0.4  # of the parent's context is a sub-agent's
CHATS = 0.4  # of the programs are people's chats
CHAT_TURNS, CHAT_CONTEXT = 0.5, 0.3  # of an agent's turns and context
SINGLES = 0.2  # of the programs are single requests
# Calls of a cloud's customers, as a characterization of Bailian's to-B trace has them
# (arXiv:2506.02634): hardly one in a thousand is a second turn, a tenth of the blocks has 77 % of
# all reuses, and a memory without bounds finds 54 % of the prompts. Lengths are made up.
API_PROMPTS, API_POPULAR, API_CALLED = 200, 0.1, 0.77
API_SHARED = 0.63  # of a prompt: with 1,200 calls, of which 200 are a prompt's first, 54 % is found


def eight_turns(
    rate: float, seed: int = 42, tool_s: float = TOOL_S, window_s: float = WINDOW_S
) -> Workload:
    """The published sweep's: eight turns, unique text, tools of half a second; `rate` programs per
    second, which arrive for `window_s`."""
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


def api_calls(shape: Shape) -> Workload:
    """Single requests of which each begins with one of many system prompts, few of them popular."""
    rng, streams = shape.rng("api calls"), Streams()
    length = round(shape.context * API_SHARED)
    prompts = [Span(streams.new(), length) for _ in range(API_PROMPTS)]
    num_popular = round(API_PROMPTS * API_POPULAR)
    programs = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        is_popular = rng.random() < API_CALLED
        begins = rng.choice(prompts[:num_popular] if is_popular else prompts[num_popular:])
        talk = Talk(streams, (begins,))
        talk.turn(shape.about(rng, shape.context - length), shape.about(rng, shape.answer))
        programs.append(shape.program(f"call{index}", talk.turns(), arrival_s))
    return Workload("api_calls", tuple(programs))


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


def forks(shape: Shape) -> Workload:
    """Groups of programs that try the same task: they share half of their context."""
    rng, streams = shape.rng("forks"), Streams()
    system = Span(streams.new(), shape.shared)
    programs = []
    groups = shape.arrivals(rng, max(1, shape.programs // FORKS))
    for group, arrival_s in enumerate(groups):
        common = (system, Span(streams.new(), round(shape.context * FORKED)))
        for index in range(FORKS):
            talk = Talk(streams, common)
            shape.grow(talk, rng, shape.about(rng, shape.turns), shape.about(rng, shape.context))
            programs.append(shape.program(f"fork{group}.{index}", talk.turns(), arrival_s))
    return Workload("forks", tuple(programs), shape.gap.note)


def compactions(shape: Shape) -> Workload:
    """Agents that, half way, replace what was said by a summary and go on."""
    rng, streams = shape.rng("compactions"), Streams()
    system = Span(streams.new(), shape.shared)
    programs = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        talk = Talk(streams, (system,))
        context, num_turns = shape.about(rng, shape.context), shape.about(rng, shape.turns)
        before = max(1, num_turns // 2)
        gap_s = shape.grow(talk, rng, before, context)
        talk.forget(keep=shape.shared)
        after = replace(shape, first=SUMMARY)
        after.grow(talk, rng, max(1, num_turns - before), context, gap_s)
        programs.append(shape.program(f"agent{index}", talk.turns(), arrival_s))
    return Workload("compactions", tuple(programs), shape.gap.note)


def subagents(shape: Shape) -> Workload:
    """Agents of which each sends out sub-agents once and waits for all of them."""
    rng, streams = shape.rng("subagents"), Streams()
    systems = Span(streams.new(), shape.shared), Span(streams.new(), shape.shared)
    programs: list[ProgramPlan] = []
    for index, arrival_s in enumerate(shape.arrivals(rng)):
        name = f"agent{index}"
        talk = Talk(streams, systems[:1])
        num_turns = max(2, shape.about(rng, shape.turns))
        shape.grow(talk, rng, num_turns, shape.about(rng, shape.context))
        asks = rng.randrange(num_turns - 1)  # the turn whose answer sends them out
        children = [f"{name}.{number}" for number in range(SUBAGENTS)]
        turns = list(talk.turns())
        turns[asks] = replace(turns[asks], tool="subagents")
        turns[asks + 1] = replace(turns[asks + 1], joins=tuple(children), gap_s=0.0)
        programs.append(shape.program(name, tuple(turns), arrival_s))
        programs += [_child(shape, rng, streams, systems[1], c, (name, asks)) for c in children]
    return Workload("subagents", tuple(programs), shape.gap.note)


def _child(
    shape: Shape,
    rng: random.Random,
    streams: Streams,
    system: Span,
    name: str,
    after: tuple[str, int],
) -> ProgramPlan:
    talk = Talk(streams, (system,))
    context = shape.about(rng, shape.context * SUB_CONTEXT)
    shape.grow(talk, rng, max(1, shape.about(rng, shape.turns) // 2), context)
    return replace(shape.program(name, talk.turns(), 0.0), after=after, parent=after[0])
