"""Arms: what is compared. An arm is a config of vLLM's, an order, and how its copies travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig

from bench.sim.bus import Bus
from bench.sim.engine import Engine
from bench.sim.hardware import Machine
from bench.sim.plan import ProgramPlan, TurnPlan
from bench.sim.workers import NoWorker, OurWorker, Worker


@dataclass(frozen=True)
class Asking:
    """What an arm may know when a turn is sent: the plan is the client's own knowledge."""

    program: ProgramPlan
    turn: TurnPlan
    index: int
    program_arrival: float  # when the program's first turn arrived
    service_s: float  # seconds that its turns have spent in the engine so far


def no_priority(asking: Asking) -> int:
    """Everyone is equal: vLLM's order of arrival."""
    return 0


def by_program(asking: Asking) -> int:
    """Older programs first: microseconds since the run began."""
    return round(asking.program_arrival * 1e6)


@dataclass(frozen=True)
class Arm:
    """`transfer` builds vLLM's KV transfer config; `worker` what copies; `prepare` may set the
    engine up further (our clock); `args` are the fields a client sends along."""

    name: str
    what: str
    transfer: Callable[[Machine], KVTransferConfig | None] = lambda machine: None
    worker: Callable[[Engine, Bus], Worker] = lambda engine, bus: NoWorker(bus)
    priority: Callable[[Asking], int] = no_priority
    args: Callable[[Asking], dict[str, Any] | None] = lambda asking: None
    prepare: Callable[[Engine, Mapping[str, ProgramPlan]], None] = lambda engine, programs: None
    scheduling: str = "fcfs"
    options: Mapping[str, Any] = field(default_factory=dict)


# --- ours -----------------------------------------------------------------------------------
def our_transfer(policy: str, has_tier: bool, **options: Any) -> Callable[[Machine], Any]:
    """Our connector with that policy, as an operator configures it."""

    def make(machine: Machine) -> KVTransferConfig:
        from continuum_connector.plugin import register

        register()
        dram_bytes = machine.dram_bytes if has_tier else 0
        return KVTransferConfig(
            kv_connector="ContinuumConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"policy": policy, "dram_bytes": dram_bytes, **options},
        )

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


def ours(policy: str, what: str, *, has_tier: bool = True, name: str = "", **options: Any) -> Arm:
    """An arm of ours."""
    return Arm(
        name=name or policy,
        what=what,
        transfer=our_transfer(policy, has_tier, **options),
        worker=our_worker,
        args=our_args,
        prepare=lambda engine, programs: engine.connector.set_clock(engine.clock),
    )


_ARMS = (
    Arm("stock", "plain vLLM"),
    Arm(
        "stock+order",
        "plain vLLM, --scheduling-policy priority, priority = the program's arrival",
        priority=by_program,
        scheduling="priority",
    ),
    ours("adaptive", "ours, the default"),
    ours("fixed_ttl", "ours, every turn pinned for 2 s"),
    ours("continuum", "ours, the paper's Equation 2, with a DRAM tier"),
    ours("continuum", "the paper: Equation 2, pins only", name="paper", has_tier=False),
    ours("infercept", "ours, InferCept's least waste"),
    ours("contextserve", "ours, ContextServe's rules"),
    ours("lru_offload", "ours, everything to DRAM, least recently used leaves"),
    ours("program_order", "ours, order only"),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}
