"""How many calls and bytecodes of ours a worker runs in a step that gives it nothing to do.

Most steps are such. A count is the same however busy the machine is, so what a change cuts shows
where times do not; `turns` counts the scheduler half. Run from the repository root:

    python -m bench.hook_cost.calls
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from bench.cli import positive, start, teaching_parser
from bench.hook_cost.turns import Counted
from bench.sim import versions
from continuum_connector.connector import StepMetadata
from continuum_connector.messages import StepPlan
from continuum_connector.vllm import plugin
from tests.vllm import kv_caches

# What its server has -> what sets that.
WORKERS: dict[str, dict[str, Any]] = {
    "no tier": {"dram_bytes": 0},
    "a tier": {"dram_bytes": "8MiB"},
    "a tier and a disk": {"dram_bytes": "8MiB", "disk_bytes": "8MiB"},
}
LAYERS = tuple(f"layers.{number}" for number in range(32))


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


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.calls", (__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=positive, default=200, help="steps of each row")
    parser.add_argument("--json", type=Path, help="write the functions of each row here")
    args = parser.parse_args()
    print("| a worker's step without orders | our calls | bytecodes | all calls | bytecodes |")
    print("|---|---|---|---|---|")
    found = []
    for name, extra in WORKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            given = extra | ({"disk_path": f"{folder}/disk"} if "disk_bytes" in extra else {})
            counted = of_worker(given, args.steps)
        numbers = counted.numbers["step"].values()
        all_calls, all_codes, calls, codes = (number / args.steps for number in numbers)
        print(f"| {name} | {calls:.1f} | {codes:.0f} | {all_calls:.1f} | {all_codes:.0f} |")
        found.append({"worker": name, "steps": args.steps, "functions": counted.functions})
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.calls")
