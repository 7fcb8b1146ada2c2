"""Recorded sessions, sub-agents included, replayed turn by turn: Claude Code's, or anybody's; and
SWE-smith's trajectories of a coding agent, each played by many programs.

Fewer blocks in common with the lane's request before than that one had: a compaction or a fork.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from bench.common.plans import ProgramPlan, Streams, Talk, TurnPlan, Workload
from bench.common.workloads import BLOCK, Line, Request, lanes, lines
from bench.sim.workloads.shape import Asked, Gaps

FOLDER_VARIABLE = "CONTINUUM_TRACES"
COMMITTED = Path(__file__).resolve().parents[1] / "traces"  # parts of them, see README.md there
NAME = "claude-code.jsonl.gz"
SOURCE = "https://github.com/callanjfox/kv-cache-tester (Apache-2.0)"
SWE = "swe-smith.jsonl.gz"
SWE_SOURCE = "https://swesmith.com (trajectories, written by continuum convert)"
Lane = list[Request]


def records(name: str, source: str, kind: type[Line]) -> list[Line]:
    """Return the records of `name`, from the folder that CONTINUUM_TRACES names or else ours.

    Raises FileNotFoundError that says where to get it.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or COMMITTED)
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"no trace {path}, so it cannot be replayed. Get it from {source} and set "
            f"{FOLDER_VARIABLE} to the folder it lies in, or unset it to replay the part in "
            f"{COMMITTED}"
        )
    return _read(path, kind)


@functools.cache
def _read(path: Path, kind: type[Line]) -> list[Line]:
    return list(lines(path, kind))


@dataclass(frozen=True)
class Replay(Asked):
    """`programs`: sessions, picked by `seed`; `turns`: of each, at most, from one that `seed`
    picks on; `scale`: tokens here per token there."""

    programs: int = 30
    turns: int = 10
    scale: float = 1 / 8

    @property
    def note(self) -> str:
        return (
            f"tokens times {self.scale:.3g}, gaps times {self.gap_scale:g} and at most "
            f"{self.longest_s:g} s, {self.turns} turns of a session at most; arrivals made up"
        )


def claude_code(replay: Replay) -> Workload:
    """Sessions of the trace. Which turn sent out a sub-agent is not recorded: it is the first
    whose gap is as long as the sub-agent took, else the one with the longest gap."""
    return sessions("claude_code", records(NAME, SOURCE, Request), replay)


def sessions(name: str, requests: Iterable[Request], replay: Replay) -> Workload:
    """The sessions that these requests are of, as that workload."""
    rng, streams = replay.rng(name.replace("_", " ")), Streams()
    sessions = _by_session(requests)
    names = rng.sample(sorted(sessions), min(replay.programs, len(sessions)))
    programs: list[ProgramPlan] = []
    for each in names:
        programs += _session(each, sessions[each], replay, rng, streams)
    return Workload(name, tuple(programs), replay.note)


def _by_session(requests: Iterable[Request]) -> dict[str, dict[str, Lane]]:
    """The lanes of each session; where none is called main, the first is it."""
    found: dict[str, dict[str, Lane]] = {}
    for (trace, lane), each in lanes(requests).items():
        found.setdefault(trace, {})[lane] = each
    for trace, every in found.items():
        if "main" not in every:
            first = next(iter(every))
            found[trace] = {"main": every[first]} | {k: v for k, v in every.items() if k != first}
    return found


def _session(
    name: str, lanes: dict[str, Lane], replay: Replay, rng: random.Random, streams: Streams
) -> list[ProgramPlan]:
    lane = lanes["main"]
    begin = rng.randrange(max(1, len(lane) - replay.turns + 1))
    begin = 0 if len(lanes) > 1 else begin  # sub-agents are sent out early
    main = lane_turns(lane[begin : begin + replay.turns], replay, streams)
    programs = []
    for other in sorted(set(lanes) - {"main"}):
        child = lane_turns(lanes[other][: replay.turns], replay, streams)
        asks = _asks(main, sum(turn.gap_s for turn in child))
        if asks is None:
            break
        child_name = f"{name}/{other}"
        joins = (*main[asks + 1].joins, child_name)
        main[asks + 1] = replace(main[asks + 1], joins=joins, gap_s=0.0)
        plan = replay.program(child_name, child, 0.0)
        programs.append(replace(plan, after=(name, asks), parent=name))
    return [replay.program(name, main, rng.random()), *programs]


def _asks(main: list[TurnPlan], seconds: float) -> int | None:
    """The turn that sent out a sub-agent that took `seconds` at least; None if there is none."""
    if len(main) < 2:
        return None
    long = [i for i, turn in enumerate(main[1:]) if turn.gap_s >= seconds]
    return long[0] if long else max(range(len(main) - 1), key=lambda i: main[i + 1].gap_s)


def lane_turns(lane: Lane, replay: Replay, streams: Streams) -> list[TurnPlan]:
    """Turns of a lane; what a later one has in common with its predecessor is equal text."""
    talk, blocks = Talk(streams), 0
    for index, record in enumerate(lane):
        if index and record.common_blocks < blocks:
            talk.forget(keep=round(record.common_blocks * BLOCK * replay.scale))
        num_new = round(record.inp * replay.scale) - talk.num_tokens
        away_s = record.think or 0.0 if index else 0.0  # None: it did not wait for the answer
        gap_s = min(away_s * replay.gap_scale, replay.longest_s)
        is_tool = index + 1 < len(lane) and "tool_result" in lane[index + 1].itypes
        talk.turn(num_new, round(record.out * replay.scale), gap_s, "tool" if is_tool else "")
        blocks = record.inp // BLOCK
    return list(talk.turns())


@dataclass(frozen=True)
class Slots(Replay):
    """`slots`: so many programs at a time, of which each is followed by another when it ends; 0:
    they arrive whoever has ended."""

    slots: int = 0


def swe(said: Slots) -> Workload:
    """Programs of which each plays one trajectory, picked by the seed, with text of its own.

    A trajectory has messages and no clock. Its lengths are estimated (traces/README.md), and the
    pauses are drawn: of the mean and spread that the Continuum paper measured for mini-swe-agent's
    tools on SWE-bench (its table 2: 0.925 s +- 3.55 s), log-normal, which is an assumption.
    """
    rng, streams = said.rng("swe"), Streams()
    every = list(lanes(records(SWE, SWE_SOURCE, Request)).values())
    pauses = Gaps("swe", longest_s=said.longest_s)
    programs = []
    for index in range(said.programs):
        asked = rng.choice(every)[: said.turns]
        lane = [structs.replace(each, think=pauses.draw(rng)[0]) for each in asked]
        plan = said.program(f"swe{index}", lane_turns(lane, said, streams), rng.random())
        if said.slots and index >= said.slots:
            before = programs[index - said.slots]
            plan = replace(plan, arrival_s=0.0, after=(before.name, len(before.turns) - 1))
        programs.append(plan)
    return Workload("swe", tuple(programs), f"{said.note}; pauses drawn (swe)")
