"""Oracles: what better forecasts or more memory could still gain. No server can run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.common.arms import Role
from bench.common.plans import Workload
from bench.sim.arms.arm import Away, LabArm, by_program
from bench.sim.arms.ours import deciding, ours
from bench.sim.hardware import Machine
from bench.sim.policies import Oracle
from continuum_connector.policy.base import RetentionPolicy

if TYPE_CHECKING:
    from bench.sim.engine import Engine


def _knowing(engine: Engine, away: Away) -> RetentionPolicy:
    return Oracle(away, engine.connector.config.max_ttl_s)


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
    states = machine.held_tokens(0)  # of a turn: one kept at its end, another it runs with
    room += num_turns * (2 + machine.model.num_drafts) * states
    return replace(machine, kv_tokens=max(machine.kv_tokens, 2 * room))


ORACLES = (
    LabArm(
        "infinite",
        "plain vLLM with VRAM for everything, priority = the program's arrival",
        role=Role.ORACLE,
        priority=by_program,
        scheduling="priority",
        machine=_room_for_all,
    ),
    replace(
        ours("adaptive", "adaptive with the true gaps", name="oracle", role=Role.ORACLE),
        prepare=deciding(_knowing),
    ),
)
