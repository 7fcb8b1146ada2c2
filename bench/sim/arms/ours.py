"""Ours: the product's connector class, a policy each, with the lab's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.common.arms import Role
from bench.common.plans import Workload
from bench.sim.arms.arm import Asking, LabArm, connector
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.workers import OurWorker, Worker
from continuum_connector.costs import Shape, device_named, prefill_prior
from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.baselines import FixedTtl
from continuum_connector.worker.disk import blocks_per_slot

if TYPE_CHECKING:
    from bench.sim.engine import Engine


NO_BOUND_S = 86_400.0  # no run of the lab is longer


def our_transfer(policy: str, has_tier: bool, **options: Any) -> Callable[[Machine], Any]:
    """Our connector with that policy, as an operator configures it."""

    def make(machine: Machine) -> Any:
        from continuum_connector.vllm.plugin import register

        register()
        dram_bytes = machine.dram_bytes if has_tier else 0
        disk: dict[str, Any] = {}
        if has_tier and machine.drive is not None:  # the path is the worker's, which is modelled
            disk = {"disk_path": "/a disk of the lab", "disk_bytes": machine.drive.num_bytes}
        return connector(
            "ContinuumConnector", policy=policy, dram_bytes=dram_bytes, **disk, **options
        )

    return make


def our_worker(engine: Engine, bus: Bus) -> Worker:
    side = engine.connector.side
    tier = side.tier if side is not None else None
    num_slots = tier.num_wanted_slots if tier is not None and tier.is_up else 0
    block_bytes, drive = engine.machine.block_bytes, engine.machine.drive
    if not num_slots or drive is None:
        return OurWorker(bus, block_bytes, num_slots)
    slot_blocks = blocks_per_slot(engine.connector.config, 1, block_bytes)
    num_disk_slots = drive.num_bytes // (slot_blocks * block_bytes)
    return OurWorker(bus, block_bytes, num_slots, engine.disk, num_disk_slots)


def our_args(asking: Asking) -> dict[str, Any]:
    """The fields of a client that says what it knows (docs/hints.md)."""
    says: dict[str, Any] = {}
    if asking.program.says_program:
        says["program"] = asking.program.name
    if asking.program.parent:
        says["parent"] = asking.program.parent
    if asking.program.says_final:
        says["final"] = asking.turn.is_final
    if asking.program.says_tools and asking.turn.tool:
        says["tools"] = [asking.turn.tool]
    return {"kv_transfer_params": {"continuum": says}}


def without_tools(asking: Asking) -> dict[str, Any]:
    """The same of a client that does not say which tool it calls; the lab's answers say none."""
    return our_args(replace(asking, program=replace(asking.program, says_tools=False)))


def set_up(engine: Engine) -> None:
    """Our clock is the engine's, and our prior that of the lab's GPU and model, by data sheets:
    what vLLM says of them is for the CPU and the tiny model that the lab pretends to serve with."""
    engine.connector.set_clock(engine.clock)
    gpu, model = engine.machine.gpu, engine.machine.model
    shape = Shape(model.token_flops, model.pair_flops, model.weight_bytes)
    engine.connector.costs.assume(prefill=prefill_prior(shape, device_named(gpu.name)))


class FixedTtlRanked(FixedTtl):
    """fixed_ttl whose blocks leave DRAM as adaptive's do."""

    dram_rank = Adaptive.dram_rank


def _rank_as_adaptive(engine: Engine) -> None:
    """Another decides, on a server whose order its own policy, adaptive, gave it."""
    set_up(engine)
    config, hinted = engine.connector.config, engine.connector.side.decider.policy
    hinted.policy = FixedTtlRanked(config.ttl_s, config.max_ttl_s)
    hinted.reads = hinted.policy.reads


def ours(
    policy: str,
    title: str,
    *,
    has_tier: bool = True,
    name: str = "",
    role: Role = Role.RELATED,
    **options: Any,
) -> LabArm:
    """An arm of ours."""
    return LabArm(
        name=name or policy,
        title=title,
        role=role,
        transfer=our_transfer(policy, has_tier, **options),
        worker=our_worker,
        args=our_args,
        prepare=set_up,
    )


def _without_drive(machine: Machine, workload: Workload) -> Machine:
    return replace(machine, drive=None)


def _fork(policy: str, title: str, name: str) -> LabArm:
    """As Continuum's paper or its code has it: no DRAM, and an order without our bound."""
    return ours(
        policy, title, name=name, has_tier=False, role=Role.RIVAL, max_head_start_s=NO_BOUND_S
    )


OURS = (
    ours("adaptive", "ours, the default; with the machine's disk, if it has one", role=Role.OURS),
    ours("fixed_ttl", "ours, every turn pinned for 2 s and stored in DRAM, which goes by last use"),
    ours("continuum", "ours, the paper's Equation 2, with a DRAM tier"),
    _fork("continuum", "the paper: Equation 2 and its order, pins only", "paper"),
    _fork(
        "released",
        "Continuum's released code: the paper's order, pins of 2 s after calls of fast tools only",
        "cont-pin",
    ),
    replace(
        _fork(
            "released",
            "the same where its parser finds no call, as in the published sweep: it pins nothing",
            "released",
        ),
        args=without_tools,
    ),
    ours("lru_offload", "ours, everything to DRAM, least recently used leaves"),
)
# What one part of adaptive is worth: it without the part, or another policy with it. Another such
# arm is `fixed_ttl`, whose DRAM goes by last use.
PARTS = (
    ours("adaptive", "adaptive without pins", name="no-pins", max_pinned_fraction=0.0),
    ours("adaptive", "adaptive in vLLM's order", name="no-order", max_head_start_s=0),
    ours(
        "adaptive", "adaptive with pins only: no DRAM, so no disk", name="no-dram", has_tier=False
    ),
    ours(
        "adaptive",
        "program order alone: neither pins nor DRAM",
        name="order-only",
        has_tier=False,
        max_pinned_fraction=0.0,
    ),
    ours("adaptive", "adaptive with the gate before new programs", name="gate", gate_wait_s=30.0),
    replace(
        ours("adaptive", "adaptive without the machine's disk", name="adaptive-no-disk"),
        machine=_without_drive,
        needs_disk=True,
    ),
    replace(
        ours("adaptive", "adaptive, of clients that name no tools", name="adaptive-no-tools"),
        args=without_tools,
    ),
    replace(
        ours("adaptive", "fixed_ttl with adaptive's order in DRAM", name="fixed_ttl-dram-order"),
        prepare=_rank_as_adaptive,
    ),
)
