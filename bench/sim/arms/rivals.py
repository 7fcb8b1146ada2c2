"""Rivals: what a server without us could run, with vLLM's own classes; and `infinite`, which shows
what more memory could still gain."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.common.arms import Role
from bench.common.plans import Workload
from bench.sim.arms.arm import LabArm, connector
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.workers import OffloadingWorker, SimpleWorker, Worker

if TYPE_CHECKING:
    from bench.sim.engine import Engine


def in_order(arm: LabArm) -> LabArm:
    """The same under vLLM's priority policy, with the program's arrival as the priority."""
    return replace(
        arm,
        name=f"{arm.name}+order",
        title=f"{arm.title}; priority = the program's arrival",
        is_ordered=True,
    )


def _simple_transfer(machine: Machine) -> Any:
    return connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=machine.dram_bytes)


def _simple_worker(engine: Engine, bus: Bus) -> Worker:
    return SimpleWorker(bus, engine.machine.block_bytes)


def _offloading(name: str, title: str, policy: str) -> LabArm:
    def transfer(machine: Machine) -> Any:
        return connector(
            "OffloadingConnector", cpu_bytes_to_use=machine.dram_bytes, eviction_policy=policy
        )

    def worker(engine: Engine, bus: Bus) -> Worker:
        return OffloadingWorker(bus, engine.machine.block_bytes)

    return LabArm(name, title, transfer, worker)


_BASES = (
    LabArm("stock", "plain vLLM"),
    LabArm("simple", "vLLM's SimpleCPUOffloadConnector", _simple_transfer, _simple_worker),
    _offloading("offloading", "vLLM's OffloadingConnector, LRU", "lru"),
    _offloading("offloading-arc", "vLLM's OffloadingConnector, ARC", "arc"),
)
RIVALS = tuple(arm for base in _BASES for arm in (base, in_order(base)))


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


INFINITE = LabArm(
    "infinite",
    "plain vLLM with VRAM for everything, priority = the program's arrival",
    role=Role.ORACLE,
    is_ordered=True,
    machine=_room_for_all,
)
