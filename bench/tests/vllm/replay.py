"""Replay: a server's own trace (`trace_path`) as a workload, with the decisions it made.

What a trace does not say is assumed: a program's next prompt begins with all that its last turn
was asked and answered, unless it is shorter. Nobody shares text with anybody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.plans import ProgramPlan, Span, Streams, TurnPlan, Workload

Record = dict[str, Any]


@dataclass(frozen=True)
class Decided:
    """What became of one turn: prompt tokens found by tier, and what was decided at its end."""

    vram: int
    dram: int
    decision: str
    then: str | None


@dataclass(frozen=True)
class Recording:
    """A trace: the server's `start` record, its programs, and per (program, turn) what it did.

    `pin_ends`: per program the causes by which its pins ended, in order.
    """

    start: Record
    workload: Workload
    decided: dict[tuple[str, int], Decided]
    pin_ends: dict[str, list[str]]


@dataclass
class _Turn:
    program: str
    number: int
    arrived: float
    num_prompt: int
    num_tokens: int
    tool: str
    is_final: bool


def recorded(path: Path) -> Recording:
    """Read a trace. Raises ValueError if it has no start, or no turn that ended."""
    return recording(json.loads(line) for line in path.read_text().splitlines() if line)


def recording(records: Iterable[Record]) -> Recording:
    """The same from records."""
    start: Record | None = None
    arrived: dict[tuple[str, int], Record] = {}
    hits: dict[tuple[str, int], Record] = {}
    turns: dict[str, list[_Turn]] = {}
    decided: dict[tuple[str, int], Decided] = {}
    pin_ends: dict[str, list[str]] = {}
    for record in records:
        match record["event"]:
            case "start":
                start = start or record
            case "arrive" | "return":
                arrived[record["program"], record["turn"]] = record
            case "admit":
                hits[record["program"], record["turn"]] = record["hit_tokens"]
            case "pin_end":
                pin_ends.setdefault(record["program"], []).append(record["cause"])
            case "decision":
                key = record["program"], record["turn"]
                if key in arrived and key in hits and not record["aborted"]:
                    turns.setdefault(key[0], []).append(_turn(arrived[key], record))
                    found = hits[key]
                    decided[key] = Decided(
                        found["vram"], found["dram"], record["decision"], record["then"]
                    )
    if start is None or not turns:
        raise ValueError("the trace has no start record or no turn that ended, so nothing to play")
    began = min(first.arrived for first, *_ in turns.values())
    streams = Streams()
    programs = tuple(_program(each, began, streams) for each in turns.values())
    return Recording(start, Workload("recorded", programs), decided, pin_ends)


def _turn(arrived: Record, decision: Record) -> _Turn:
    said = {hint["hint"]: hint.get("value") for hint in decision.get("hints", ())}
    tools = decision["known"]["tools"]
    return _Turn(
        decision["program"],
        decision["turn"],
        arrived["now"],
        arrived["tokens"],
        decision["tokens"],
        tools[0] if tools else "",
        bool(said.get("final")),
    )


def _program(turns: Sequence[_Turn], began: float, streams: Streams) -> ProgramPlan:
    """A plan whose turns arrive when they did, or when the one before is answered if later."""
    stream, known, plans = streams.new(), 0, []
    for turn in turns:
        if turn.num_prompt < known:  # it does not go on where the last one ended
            stream = streams.new()
        known = turn.num_tokens
        answer = Span(stream, turn.num_tokens - turn.num_prompt, start=turn.num_prompt)
        plans.append(
            TurnPlan(
                (Span(stream, turn.num_prompt),),
                answer,
                tool=turn.tool,
                is_final=turn.is_final,
                at_s=turn.arrived - began,
            )
        )
    return ProgramPlan(turns[0].program, tuple(plans), turns[0].arrived - began)
