"""Rivals: what a server without us could run, with vLLM's own classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.sim.arms.arm import Away, LabArm, by_program, connector
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.rival_workers import OffloadingWorker, SimpleWorker, TieringWorker
from bench.sim.workers import Worker

if TYPE_CHECKING:
    from bench.sim.engine import Engine


def in_order(arm: LabArm) -> LabArm:
    """The same under vLLM's priority policy, with the program's arrival as the priority."""
    return replace(
        arm,
        name=f"{arm.name}+order",
        title=f"{arm.title}; priority = the program's arrival",
        priority=by_program,
        scheduling="priority",
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


def _tiering_transfer(machine: Machine) -> Any:
    from bench.sim.fs_tier import TIER, TieringSpec

    return connector(
        "OffloadingConnector",
        cpu_bytes_to_use=machine.dram_bytes,
        spec_name=TieringSpec.__name__,
        spec_module_path=TieringSpec.__module__,
        secondary_tiers=[{"type": TIER}],
    )


def _tiering_worker(engine: Engine, bus: Bus) -> Worker:
    assert engine.disk is not None  # needs_disk
    return TieringWorker(bus, engine.machine.block_bytes, disk=engine.disk)


def _use_disk(engine: Engine, away: Away) -> None:
    (tier,) = engine.connector.connector_scheduler.manager.secondary_tiers
    tier.use(engine.disk, engine.clock)


_BASES = (
    LabArm("stock", "plain vLLM"),
    LabArm("simple", "vLLM's SimpleCPUOffloadConnector", _simple_transfer, _simple_worker),
    _offloading("offloading", "vLLM's OffloadingConnector, LRU", "lru"),
    _offloading("offloading-arc", "vLLM's OffloadingConnector, ARC", "arc"),
    LabArm(
        "offloading-fs",
        "vLLM's OffloadingConnector, LRU, tiered: all that DRAM gets goes to its fs tier as well",
        _tiering_transfer,
        _tiering_worker,
        prepare=_use_disk,
        needs_disk=True,
    ),
)
RIVALS = tuple(arm for base in _BASES for arm in (base, in_order(base)))
