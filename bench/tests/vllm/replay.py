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


def recorded(path: Path) -> Recording:
    """Read a trace. Raises ValueError if it has no start, or no turn that ended."""
    return recording(json.loads(line) for line in path.read_text().splitlines() if line)


def recording(records: Iterable[Record]) -> Recording:
    """The same from records."""
    start: Record | None = None
    arrived: dict[tuple[str, int], Record] = {}
    hits: dict[tuple[str, int], Record] = {}
    turns: dict[str, list[tuple[Record, Record]]] = {}  # how each came, and was decided
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
                    turns.setdefault(key[0], []).append((arrived[key], record))
                    found = hits[key]
                    decided[key] = Decided(
                        found["vram"], found["dram"], record["decision"], record["then"]
                    )
    if start is None or not turns:
        raise ValueError("the trace has no start record or no turn that ended, so nothing to play")
    began = min(first["now"] for (first, _), *_ in turns.values())
    streams = Streams()
    programs = tuple(_program(each, began, streams) for each in turns.values())
    return Recording(start, Workload("recorded", programs), decided, pin_ends)


def _program(turns: Sequence[tuple[Record, Record]], began: float, streams: Streams) -> ProgramPlan:
    """A plan whose turns arrive when they did, or when the one before is answered if later."""
    stream, known, plans = streams.new(), 0, []
    for arrived, decision in turns:
        num_prompt, tools = arrived["tokens"], decision["known"]["tools"]
        if num_prompt < known:  # it does not go on where the last one ended
            stream = streams.new()
        known = decision["tokens"]
        said = {hint["hint"]: hint.get("value") for hint in decision.get("hints", ())}
        plans.append(
            TurnPlan(
                (Span(stream, num_prompt),),
                Span(stream, known - num_prompt, start=num_prompt),
                tool=tools[0] if tools else "",
                is_final=bool(said.get("final")),
                at_s=arrived["now"] - began,
            )
        )
    first, decided = turns[0]
    return ProgramPlan(decided["program"], tuple(plans), first["now"] - began)
