"""SWE-smith: recorded trajectories of a coding agent, each played by many programs.

A trajectory has messages and no clock. Its lengths are estimated (traces/README.md), and the pauses
are drawn: of the mean and spread that the Continuum paper measured for mini-swe-agent's tools on
SWE-bench (its table 2: 0.925 s +- 3.55 s), log-normal, which is an assumption.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from msgspec import structs

from bench.common.plans import Streams, Workload
from bench.common.workloads import Request, lanes
from bench.sim.workloads.recorded import Replay, lane_turns, records
from bench.sim.workloads.shape import Gaps

NAME = "swe-smith.jsonl.gz"
SOURCE = "https://swesmith.com (trajectories, written by continuum convert)"


@dataclass(frozen=True)
class Slots(Replay):
    """`slots`: so many programs at a time, of which each is followed by another when it ends; 0:
    they arrive whoever has ended. `gaps`: a curve of shape.py."""

    slots: int = 0
    gaps: str = "swe"


def swe(said: Slots) -> Workload:
    """Programs of which each plays one trajectory, picked by the seed, with text of its own."""
    rng, streams = random.Random(f"swe {said.seed}"), Streams()
    every = list(lanes(records(NAME, SOURCE, Request)).values())
    pauses = Gaps(said.gaps, longest_s=said.longest_s)
    programs = []
    for index in range(said.programs):
        asked = rng.choice(every)[: said.turns]
        lane = [structs.replace(each, think=pauses.draw(rng)[0]) for each in asked]
        plan = said.plan(f"swe{index}", lane_turns(lane, said, streams), rng.random())
        if said.slots and index >= said.slots:
            before = programs[index - said.slots]
            plan = replace(plan, arrival_s=0.0, after=(before.name, len(before.turns) - 1))
        programs.append(plan)
    return Workload("swe", tuple(programs), f"{said.note}; pauses drawn ({said.gaps})")
