"""How many calls our hooks make: of a step that only decodes, and of a turn's end and begin.

Python and C functions, counted by the interpreter's own profiler. A count is the same however busy
the machine is, so what a change cuts shows where times do not. `worker` is not a policy: it counts
the worker half's Python calls and bytecodes in a step that gives it nothing to do. Run from the
repository root:

    python -m bench.hook_cost.calls
    python -m bench.hook_cost.calls --policies worker       # seconds
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from bench.cli import many, start
from bench.hook_cost.arms import build_pair, interleave, options
from bench.hook_cost.turns import Counted
from bench.sim import versions
from continuum_connector.messages import StepPlan
from continuum_connector.vllm import plugin
from continuum_connector.worker_hooks import StepMetadata
from tests.vllm import kv_caches

HOOKS = (
    "before_queued",
    "on_new_request",
    "rank",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)

WORKER = "worker"
# What its server has -> what sets that.
WORKERS: dict[str, dict[str, Any]] = {
    "no tier": {"dram_bytes": 0},
    "a tier": {"dram_bytes": "8MiB"},
    "a tier and a disk": {"dram_bytes": "8MiB", "disk_bytes": "8MiB"},
}
LAYERS = tuple(f"layers.{number}" for number in range(32))

SCHEDULING = ("schedule", "update_from_output", "add_request")


class Count:
    """Calls below some methods of an object; one within another counts once."""

    def __init__(self, target: Any, methods: Sequence[str]) -> None:
        self._profile = cProfile.Profile()
        self._depth = 0
        self._num_counted = 0
        for method in methods:
            setattr(target, method, self._counted(getattr(target, method)))

    def _counted(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if self._depth == 1:
                self._num_counted += 1
                self._profile.enable()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._profile.disable()

        return counted

    @property
    def total(self) -> int:
        """Without those that switch the profiler off."""
        stats: Any = pstats.Stats(self._profile)
        return int(stats.total_calls) - self._num_counted


def of_decoding(args: argparse.Namespace, policy: str) -> list[float]:
    """Calls of a step that only decodes: of stock, of ours."""
    args = argparse.Namespace(**vars(args) | {"output": 3000, "vram_blocks": 120_000})
    arms = build_pair(args, policy, args.pins)
    interleave(arms, args.warmup)
    counts = [Count(arm.engine.scheduler, SCHEDULING) for arm in arms]
    interleave(arms, args.steps)
    return [count.total / args.steps for count in counts]


def of_turns(args: argparse.Namespace, policy: str) -> float:
    """Calls below our hooks, per turn that ends while others wait and DRAM is full."""
    _, ours = build_pair(args, policy, args.pins)
    ours.num_turns += args.waiting
    interleave([ours], args.warmup + args.output)  # the first turns end then
    finished = ours.engine.finish_reasons
    num_before = len(finished)
    count = Count(ours.engine.connector, HOOKS)
    interleave([ours], args.steps)
    return count.total / (len(finished) - num_before)


def a_worker(extra: dict[str, Any]) -> Any:
    """The worker half as vLLM makes it, with a KV cache of a few blocks."""
    plugin.register()
    transfer = KVTransferConfig(
        kv_connector="ContinuumConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    config = versions.vllm_config(block_size=16, transfer=transfer)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    caches, kv_cache_config = kv_caches.build(config, "BLHNC", dict.fromkeys(LAYERS, spec))
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
    worker.register_kv_caches(caches)
    return worker


def run_step(worker: Any, metadata: Any) -> None:
    """The hooks of one step, as vLLM calls them (v1/worker/gpu/kv_connector.py; per layer
    model_executor/layers/attention/kv_transfer_utils.py)."""
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    for layer in LAYERS:
        if worker.has_connector_metadata():
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, None, None)
    worker.wait_for_save()
    worker.get_transfer_results(set())
    worker.get_block_ids_with_load_errors()
    worker.get_kv_connector_stats()
    worker.get_kv_connector_kv_cache_events()
    worker.build_connector_worker_meta()
    worker.clear_connector_metadata()


def of_worker(extra: dict[str, Any], num_steps: int) -> Counted:
    """Steps in which a worker has nothing to do, after those in which it told what there is at its
    start. Each brings a plan of its own, as one does that another process sent."""
    worker, counted = a_worker(extra), Counted()
    for _ in range(20):
        run_step(worker, StepMetadata(StepPlan()))
        time.sleep(0.05 if "disk_path" in extra else 0.0)  # while a thread opens its disk
    for _ in range(num_steps):
        with counted("step"):
            run_step(worker, StepMetadata(StepPlan()))
    worker.shutdown()
    return counted


def tell_worker(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print("| a worker's step without orders | our calls | bytecodes | all calls | bytecodes |")
    print("|---|---|---|---|---|")
    for name, extra in WORKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            given = extra | ({"disk_path": f"{folder}/disk"} if "disk_bytes" in extra else {})
            counted = of_worker(given, args.steps)
        numbers = counted.numbers["step"].values()
        all_calls, all_codes, calls, codes = (number / args.steps for number in numbers)
        print(f"| {name} | {calls:.1f} | {codes:.0f} | {all_calls:.1f} | {all_codes:.0f} |")
        yield {"worker": name, "steps": args.steps, "functions": counted.functions}


def tell_policies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print("| policy | a decoding step, stock | ours | more | a turn, in our hooks |")
    print("|---|---|---|---|---|")
    for policy in args.policies:
        if policy == WORKER:
            continue
        stock, ours = of_decoding(args, policy)
        turn = of_turns(args, policy)
        more = ours - stock
        print(f"| {policy} | {stock:,.0f} | {ours:,.0f} | {more:.1f} | {turn:,.0f} |", flush=True)
        yield {"policy": policy, "stock": stock, "ours": ours, "turn": turn}


def main() -> None:
    parser = options("calls", __doc__, others=(WORKER,), steps=200)
    parser.add_argument("--waiting", type=many, default=1000, help="turns that wait beside them")
    parser.add_argument("--pins", type=many, default=1000, help="programs pinned at the start")
    args = parser.parse_args()
    found = list(tell_worker(args)) if WORKER in args.policies else []
    if {*args.policies} - {WORKER}:
        found += tell_policies(args)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.calls")
