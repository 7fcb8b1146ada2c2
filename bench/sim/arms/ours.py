"""Ours: the product's connector class, a policy each, with the lab's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.sim.arms.arm import Arm, Asking, Away, connector
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.workers import OurWorker, Worker

if TYPE_CHECKING:
    from bench.sim.engine import Engine


def our_transfer(policy: str, has_tier: bool, **options: Any) -> Callable[[Machine], Any]:
    """Our connector with that policy, as an operator configures it."""

    def make(machine: Machine) -> Any:
        from continuum_connector.vllm.plugin import register

        register()
        dram_bytes = machine.dram_bytes if has_tier else 0
        return connector("ContinuumConnector", policy=policy, dram_bytes=dram_bytes, **options)

    return make


def our_worker(engine: Engine, bus: Bus) -> Worker:
    side = engine.connector.side
    num_slots = side.tier.num_wanted_slots if side is not None and side.tier.is_up else 0
    return OurWorker(bus, engine.machine.block_bytes, num_slots)


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


def use_clock(engine: Engine, away: Away) -> None:
    engine.connector.set_clock(engine.clock)


def ours(policy: str, what: str, *, has_tier: bool = True, name: str = "", **options: Any) -> Arm:
    """An arm of ours."""
    return Arm(
        name=name or policy,
        what=what,
        transfer=our_transfer(policy, has_tier, **options),
        worker=our_worker,
        args=our_args,
        prepare=use_clock,
    )


OURS = (
    ours("adaptive", "ours, the default"),
    ours("fixed_ttl", "ours, every turn pinned for 2 s and stored in DRAM"),
    ours("continuum", "ours, the paper's Equation 2, with a DRAM tier"),
    ours(
        "continuum", "the paper: Equation 2 and its order, pins only", name="paper", has_tier=False
    ),
    ours("fixed_ttl", "the paper's order, pins of 2 s only", name="cont-pin", has_tier=False),
    ours("infercept", "ours, InferCept's least waste"),
    ours("contextserve", "ours, ContextServe's rules"),
    ours("lru_offload", "ours, everything to DRAM, least recently used leaves"),
    ours("program_order", "ours, order only"),
)
