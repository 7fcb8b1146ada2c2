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


def _vllms(
    name: str, kind: str, half: type[SimpleWorker | OffloadingWorker], policy: str = ""
) -> LabArm:
    """A connector of vLLM's, the worker half that stands for its own, and how blocks leave DRAM."""
    options = {"eviction_policy": policy} if policy else {}

    def transfer(machine: Machine) -> Any:
        return connector(kind, cpu_bytes_to_use=machine.dram_bytes, **options)

    def worker(engine: Engine, bus: Bus) -> Worker:
        return half(bus, engine.machine.block_bytes)

    title = f"vLLM's {kind}" + (f", {policy.upper()}" if policy else "")
    return LabArm(name, title, transfer, worker)


_BASES = (
    LabArm("stock", "plain vLLM"),
    _vllms("simple", "SimpleCPUOffloadConnector", SimpleWorker),
    _vllms("offloading", "OffloadingConnector", OffloadingWorker, "lru"),
    _vllms("offloading-arc", "OffloadingConnector", OffloadingWorker, "arc"),
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
