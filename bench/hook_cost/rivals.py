"""vLLM's own connectors in the place of ours, with a full DRAM: what their scheduler halves take.

Their worker halves are the lab's (bench/sim/rival_workers.py), on a bus that takes no time. The
prompts of these benches are never asked twice, so nothing is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.sim.bus import Bus
from bench.sim.rival_workers import OffloadingWorker, SimpleWorker
from tests.vllm.tiering import SLOT_BYTES

AT_ONCE = 1e15  # bytes per second


@dataclass(frozen=True)
class Rival:
    """A connector of vLLM's, the lab's worker half of it, and more of its config."""

    connector: str
    worker: type[SimpleWorker | OffloadingWorker]
    options: dict[str, str] = field(default_factory=dict)

    def half(self) -> Any:
        """A worker half whose copies take no time."""
        return self.worker(Bus(AT_ONCE, AT_ONCE, 0.0), SLOT_BYTES)


RIVALS = {
    "simple": Rival("SimpleCPUOffloadConnector", SimpleWorker),
    "offloading": Rival("OffloadingConnector", OffloadingWorker, {"eviction_policy": "lru"}),
    "offloading-arc": Rival("OffloadingConnector", OffloadingWorker, {"eviction_policy": "arc"}),
}
