"""Makes a trace that breaks a rule small: tries what is simpler, keeps what still breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.vllm.policy_machine import broken
from tests.vllm.policy_traces import Trace, Turn, World

MAX_TRIES = 400


def shrink(trace: Trace, rule: str, max_tries: int = MAX_TRIES) -> Trace:
    """Return a small trace that breaks the rule, too, after at most so many tries."""
    num_tries = 0

    def breaks(other: Trace) -> bool:
        nonlocal num_tries
        num_tries += 1
        return num_tries <= max_tries and bool(other.turns) and bool(broken(other, [rule]))

    for simpler in (_fewer_turns, _plainer, _fewer_turns):
        trace = _as_far_as_possible(trace, simpler, breaks)
    return trace


def report(trace: Trace, found: dict[str, str], max_tries: int = MAX_TRIES) -> str:
    """What a trace breaks, and a small one that breaks the first of it, to be run again."""
    rule, _ = next(iter(found.items()))
    small = shrink(trace, rule, max_tries)
    said = "".join(f"{name}: {how}\n" for name, how in found.items())
    return (
        f"{said}\nshrunk, {rule}: {broken(small, [rule])[rule]}\n\n"
        "from tests.vllm.policy_machine import broken\n"
        "from tests.vllm.policy_traces import Trace, Turn, World\n\n"
        f"print(broken({small!r}, [{rule!r}]))\n"
    )


def _as_far_as_possible(
    trace: Trace, simpler: Callable[[Trace], Iterator[Trace]], breaks: Callable[[Trace], bool]
) -> Trace:
    while (found := next(filter(breaks, simpler(trace)), None)) is not None:
        trace = found
    return trace


def _fewer_turns(trace: Trace) -> Iterator[Trace]:
    """Without one of the clients, then without ever shorter rows of turns, the last ones first."""
    for client in dict.fromkeys(turn.client for turn in trace.turns):
        kept = trace
        for number in reversed(range(len(trace.turns))):
            if trace.turns[number].client == client:
                kept = kept.without(number, 1)
        yield kept
    length = len(trace.turns)
    while length := length // 2:
        for first in reversed(range(0, len(trace.turns), length)):
            yield trace.without(first, min(length, len(trace.turns) - first))


def _plainer(trace: Trace) -> Iterator[Trace]:
    """With a field as by default: of the world, of all turns of a client, of one turn."""
    for field in fields(World):
        if getattr(trace.world, field.name) != field.default:
            yield replace(trace, world=replace(trace.world, **{field.name: field.default}))
    for field in fields(Turn)[2:]:  # who it is and what it asks stays
        for who in dict.fromkeys(turn.who for turn in trace.turns):
            turns = tuple(
                replace(turn, **{field.name: field.default}) if turn.who == who else turn
                for turn in trace.turns
            )
            if turns != trace.turns:
                yield replace(trace, turns=turns)
