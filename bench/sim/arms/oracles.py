"""Oracles: what better forecasts or more memory could still gain. No server can run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.sim.arms.arm import Arm, Away, by_program
from bench.sim.arms.ours import ours, use_clock
from bench.sim.hardware import Machine
from bench.sim.plan import Workload
from continuum_connector.policy.baselines import Oracle

if TYPE_CHECKING:
    from bench.sim.engine import Engine


def _know(engine: Engine, away: Away) -> None:
    """Put one who knows the gaps where adaptive decides."""
    use_clock(engine, away)
    connector = engine.connector
    connector.side.decider.policy.policy = Oracle(away, connector.config.max_ttl_s)


def _room_for_all(machine: Machine, workload: Workload) -> Machine:
    """VRAM in which nothing is ever evicted: the last block of each text is a partial one."""
    ends: dict[int, int] = {}
    num_turns = 0
    for program in workload.programs:
        for turn in program.turns:
            num_turns += 1
            for span in (*turn.prompt, turn.answer):
                end = span.start + span.length
                ends[span.stream] = max(ends.get(span.stream, 0), end)
    room = sum(ends.values()) + 2 * machine.block_size * (num_turns + len(ends))
    return replace(machine, kv_tokens=max(machine.kv_tokens, 2 * room))


ORACLES = (
    Arm(
        "infinite",
        "plain vLLM with VRAM for everything, priority = the program's arrival",
        priority=by_program,
        scheduling="priority",
        machine=_room_for_all,
    ),
    replace(ours("adaptive", "adaptive with the true gaps", name="oracle"), prepare=_know),
)
