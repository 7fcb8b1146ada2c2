"""Oracles: what better forecasts or more memory could still gain. No server can run them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from bench.common.arms import Role
from bench.common.plans import Workload
from bench.sim.arms.arm import Away, LabArm, by_program
from bench.sim.arms.ours import deciding, ours
from bench.sim.hardware import Machine
from continuum_connector.forecast import Forecast
from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import (
    Choice,
    FinishedTurn,
    Resident,
    RetentionPolicy,
    Snapshot,
)

if TYPE_CHECKING:
    from bench.sim.engine import Engine


class Oracle(Adaptive):
    """Values everything as adaptive does, with the true gap in place of its forecast: what adaptive
    loses against it is what better forecasts could still gain.

    If nobody knows the true gap, as for a program that does not name itself, it is adaptive.
    """

    name = "oracle"

    def __init__(self, away: Away, max_ttl_s: float) -> None:
        super().__init__(max_ttl_s)
        self._away = away

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        try:
            gap_s = self._away(turn.program, snapshot.now)
        except LookupError:
            return super().decide(turn, snapshot)
        gap = Forecast.never() if gap_s is None else Forecast.known(gap_s)
        return super().decide(structs.replace(turn, gap=gap), snapshot)

    def dram_rank(self, resident: Resident, now: float) -> float:
        """As adaptive's; the blocks of a program that is not coming back are worth nothing."""
        if resident.is_waiting:
            return super().dram_rank(resident, now)
        try:
            away_s = self._away(resident.program, now)
        except LookupError:
            return super().dram_rank(resident, now)
        return float("-inf") if away_s is None else -away_s - resident.queueing_s


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
