"""LabArm: an arm in the lab. A config of vLLM's, an order, and how its copies travel.

Arms can be read without vLLM, which takes seconds to import; they cannot be played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.common.arms import Arm
from bench.common.plans import ProgramPlan, TurnPlan, Workload
from bench.sim.bus import Bus
from bench.sim.hardware import Machine
from bench.sim.workers import Worker

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from bench.sim.engine import Engine


@dataclass(frozen=True)
class Asking:
    """What an arm may know when a turn is sent: the plan is the client's own knowledge."""

    program: ProgramPlan
    turn: TurnPlan


@dataclass(frozen=True)
class LabArm(Arm):
    """`transfer` builds vLLM's KV transfer config; `worker` what copies; `prepare` may set the
    engine up further: our clock, our prior. `args` are the fields a client sends along;
    `machine` replaces the machine, for arms that no machine could run; `is_ordered`: under vLLM's
    priority policy, older programs first; `needs_disk`: it is nothing of its own without one."""

    transfer: Callable[[Machine], KVTransferConfig | None] = lambda machine: None
    worker: Callable[[Engine, Bus], Worker] = lambda engine, bus: Worker(bus)
    args: Callable[[Asking], dict[str, Any] | None] = lambda asking: None
    prepare: Callable[[Engine], None] = lambda engine: None
    machine: Callable[[Machine, Workload], Machine] = lambda machine, workload: machine
    is_ordered: bool = False
    needs_disk: bool = False

    def lacks(self, has_disk: bool) -> str:
        """Why it is not run on a machine with or without a disk, "" if it is."""
        return "it needs a machine with a disk" if self.needs_disk and not has_disk else ""


def connector(name: str, module: str | None = None, **options: Any) -> KVTransferConfig:
    """A KV transfer config; `options` are its extra config."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_module_path=module,
        kv_connector_extra_config=options,
    )
