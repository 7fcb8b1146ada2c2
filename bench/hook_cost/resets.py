"""What a new epoch costs the scheduler, by how many blocks lie below VRAM.

DRAM is full of made-up programs, and the weights change. Timed, in CPU time of the scheduler's
thread: the hook that forgets it all, the first store that needs slots again, and the steps in
which what was forgotten is taken apart. Run from the repository root:

    python -m bench.hook_cost.resets
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

from bench.cli import positive, start, teaching_parser
from bench.hook_cost.population import fill_dram
from continuum_connector.messages import WorkerReport
from continuum_connector.scheduler.kv_groups import block_key
from continuum_connector.scheduler.tiers.disk_index import DiskIndex
from continuum_connector.worker_hooks import WorkerMetadata
from tests.vllm.tiering import tiered

SIZES = (10_000, 100_000, 1_000_000)
PER_PROGRAM = 100  # blocks
STORED = 1_000  # blocks, of the first store in the new epoch


def measure(num_blocks: int) -> dict[str, float]:
    """CPU milliseconds by what was timed, and how many steps the rest took."""
    engine = tiered(num_blocks=200, num_slots=num_blocks)
    side = engine.connector.side
    engine.connector.update_connector_output(_report(num_blocks))
    fill_dram(side, num_blocks, max(1, num_blocks // PER_PROGRAM))
    index, now = side.tier.index, engine.clock()
    gc.collect()
    timed = {"reset": _ms(engine.connector.reset_cache)}
    keys = [block_key(number.to_bytes(32, "big"), 0) for number in range(STORED)]
    timed["store"] = _ms(lambda: index.reserve(keys, "new", now))
    bites = []
    while index.past.num:
        bites.append(_ms(lambda: side.steps.plan(now)))
    timed |= {"bite": statistics.median(bites), "worst": max(bites), "steps": len(bites)}
    timed["disk"] = _ms(_disk(num_blocks).clear)
    return timed


def _disk(num_slots: int) -> DiskIndex:
    disk = DiskIndex()
    disk.grow(num_slots)
    for first in range(0, num_slots, PER_PROGRAM):
        places = range(first, min(num_slots, first + PER_PROGRAM))
        keys = [block_key(place.to_bytes(32, "big"), 0) for place in places]
        disk.settle(disk.reserve(f"p{first}", keys, range(len(keys))), written=True)
    return disk


def _report(num_slots: int) -> Any:
    report = WorkerReport(ready_slots={0: num_slots})
    return SimpleNamespace(kv_connector_worker_meta=WorkerMetadata(report))


def _ms(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


def main() -> None:
    parser = teaching_parser("python -m bench.hook_cost.resets", __doc__.splitlines()[0])
    parser.add_argument("--blocks", type=positive, nargs="+", default=SIZES, help="in DRAM")
    args = parser.parse_args()
    columns = ("reset", "store", "bite", "worst", "disk")
    print(f"| blocks | {', ms | '.join(columns)}, ms | steps |")
    print("|---" * (len(columns) + 2) + "|")
    for num_blocks in args.blocks:
        row = measure(num_blocks)
        times = " | ".join(f"{row[column]:.2f}" for column in columns)
        print(f"| {num_blocks:,} | {times} | {row['steps']} |", flush=True)


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost.resets")
