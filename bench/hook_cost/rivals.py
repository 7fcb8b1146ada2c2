"""vLLM's own connectors in the place of ours: what their scheduler halves take, with a full DRAM.

Their worker halves are the lab's (bench/sim/rival_workers.py), on a bus that takes no time. The
prompts of these benches are never asked twice, so nothing is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.hook_cost.population import run_turns
from bench.sim.bus import Bus
from bench.sim.rival_workers import OffloadingWorker, SimpleWorker
from tests.vllm.fake_worker import FakeWorker
from tests.vllm.harness import Engine
from tests.vllm.tiering import BLOCK, SLOT_BYTES

AT_ONCE = 1e15  # bytes per second


@dataclass(frozen=True)
class Rival:
    connector: str
    worker: Callable[[Bus, int], Any]
    options: dict[str, str]
    in_dram: Callable[[Any], int]  # connector -> blocks that its DRAM has

    def build(self, args: argparse.Namespace, common: dict[str, Any]) -> Engine:
        """An engine whose turns have filled DRAM, `num_turns(args)` of them."""
        config = {"cpu_bytes_to_use": args.dram_blocks * SLOT_BYTES} | self.options
        engine = Engine(connector=self.connector, extra_config=config, **common)
        engine.workers = [_Worker(engine, self.worker(Bus(AT_ONCE, AT_ONCE, 0.0), SLOT_BYTES))]
        run_turns(engine, num_turns(args), args.prompt)
        num = self.in_dram(engine.connector)
        assert num >= 0.98 * args.dram_blocks, f"{num} blocks in DRAM of {args.dram_blocks}"
        return engine


class _Worker(FakeWorker):
    """Samples as the harness' worker does, and copies as the rival's does."""

    def __init__(self, engine: Engine, half: Any) -> None:
        super().__init__(engine.groups)
        self._half, self._clock = half, engine.clock

    def execute(self, step: Any) -> dict[str, list[int]]:
        now = self._clock()
        self._half.start(step, now, now)
        return super().execute(step)

    def take_connector_output(self) -> dict[str, Any]:
        output: dict[str, Any] = self._half.output(self._clock())
        return output


def num_turns(args: argparse.Namespace) -> int:
    """Turns that fill DRAM, each with whole blocks of its prompt; at least the pins of ours."""
    per_turn = max(1, args.prompt // BLOCK)
    return max(args.pins, -(-args.dram_blocks // per_turn))


def _of_simple(connector: Any) -> int:
    return len(connector.scheduler_manager.cpu_block_pool.cached_block_hash_to_block)


def _of_offloading(connector: Any) -> int:
    policy = connector.connector_scheduler.manager._policy
    queues = (policy.t1, policy.t2) if hasattr(policy, "t1") else (policy.chunks,)
    return sum(map(len, queues))


def _offloading(policy: str) -> Rival:
    options = {"eviction_policy": policy}
    return Rival("OffloadingConnector", OffloadingWorker, options, _of_offloading)


RIVALS = {
    "simple": Rival("SimpleCPUOffloadConnector", SimpleWorker, {}, _of_simple),
    "offloading": _offloading("lru"),
    "offloading-arc": _offloading("arc"),
}
