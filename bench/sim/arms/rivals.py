"""Rivals: what a server without us could run. vLLM's own classes, and a model of LMCache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.sim.arms.arm import LabArm, by_program, by_service, connector
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.rival_workers import LmcacheWorker, OffloadingWorker, SimpleWorker
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


def _simple(name: str, title: str, is_lazy: bool) -> LabArm:
    def transfer(machine: Machine) -> Any:
        return connector(
            "SimpleCPUOffloadConnector",
            cpu_bytes_to_use=machine.dram_bytes,
            lazy_offload=is_lazy,
        )

    def worker(engine: Engine, bus: Bus) -> Worker:
        return SimpleWorker(bus, engine.machine.block_bytes)

    return LabArm(name, title, transfer, worker)


def _offloading(name: str, title: str, policy: str) -> LabArm:
    def transfer(machine: Machine) -> Any:
        return connector(
            "OffloadingConnector", cpu_bytes_to_use=machine.dram_bytes, eviction_policy=policy
        )

    def worker(engine: Engine, bus: Bus) -> Worker:
        return OffloadingWorker(bus, engine.machine.block_bytes)

    return LabArm(name, title, transfer, worker)


def _lmcache_transfer(machine: Machine) -> Any:
    num_bytes, token_bytes = machine.dram_bytes, machine.model.token_bytes
    num_tokens = num_bytes // token_bytes
    return connector("LmcacheModel", "bench.sim.lmcache", num_tokens=num_tokens)


def _lmcache_worker(engine: Engine, bus: Bus) -> Worker:
    return LmcacheWorker(bus, engine.machine.model.token_bytes)


_STOCK = LabArm("stock", "plain vLLM")
_BASES = (
    _STOCK,
    _simple("simple", "vLLM's SimpleCPUOffloadConnector, eager", is_lazy=False),
    _simple("simple-lazy", "vLLM's SimpleCPUOffloadConnector, lazy", is_lazy=True),
    _offloading("offloading", "vLLM's OffloadingConnector, LRU", "lru"),
    _offloading("offloading-arc", "vLLM's OffloadingConnector, ARC", "arc"),
    LabArm(
        "lmcache",
        "a model of LMCache 0.3 to 0.5: chunks of 256 tokens, LRU, copies that the step waits for",
        _lmcache_transfer,
        _lmcache_worker,
    ),
)
RIVALS = (
    *(arm for base in _BASES for arm in (base, in_order(base))),
    replace(
        _STOCK,
        name="plas",
        title="Autellix's order: programs that have run for less go first; without its queue "
        "levels",
        priority=by_service,
        scheduling="priority",
    ),
)
