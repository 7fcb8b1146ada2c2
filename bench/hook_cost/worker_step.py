"""Times a worker's hooks over the native engine: with nothing to do, and with copies to submit."""

from __future__ import annotations

import time

import numpy as np

from continuum_connector.config import ContinuumConfig
from continuum_connector.messages import LoadOrder, StepPlan, StoreOrder
from continuum_connector.worker.engine import Region
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
from continuum_connector.worker.worker import ContinuumWorker

NUM_BLOCKS, BLOCK_BYTES, BLOCKS_PER_ORDER = 4096, 4096, 64


def measure_worker(num_steps: int) -> dict[str, list[float]]:
    """Return microseconds per step: an idle step, and one with a store and a load."""
    memory = np.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    region = Region(memory.ctypes.data, BLOCK_BYTES, 0, BLOCK_BYTES)
    layout = Layout(
        regions=(region,),
        num_blocks=NUM_BLOCKS,
        slot_bytes=BLOCK_BYTES,
        device="cpu",
        device_index=0,
    )

    def make_engine(layout: Layout, num_slots: int) -> NativeEngine:
        return NativeEngine("sim", layout, num_slots)

    worker = ContinuumWorker(make_engine, ContinuumConfig(dram_bytes=NUM_BLOCKS * BLOCK_BYTES))
    worker.register(layout)
    try:
        idle = [_step(worker, StepPlan()) for _ in range(num_steps)]
        busy = [_step(worker, _plan(number)) for number in range(num_steps)]
    finally:
        worker.shutdown()
    return {"nothing to copy": idle, f"one store, one load of {BLOCKS_PER_ORDER} blocks": busy}


def _plan(number: int) -> StepPlan:
    first = (2 * number * BLOCKS_PER_ORDER) % (NUM_BLOCKS - 2 * BLOCKS_PER_ORDER)
    there = np.arange(first, first + BLOCKS_PER_ORDER, dtype=np.int32)
    back = there + BLOCKS_PER_ORDER
    store = StoreOrder(2 * number + 1, there, there)
    load = LoadOrder(2 * number + 2, f"request{number}", back, back)
    return StepPlan((load,), (store,))


def _step(worker: ContinuumWorker, plan: StepPlan) -> float:
    """The hooks of one step, in vLLM's order; returns microseconds."""
    began = time.perf_counter()
    worker.begin(plan)
    worker.start_loads()
    worker.submit_stores()
    worker.poll()
    worker.take_report()
    took = time.perf_counter() - began
    time.sleep(0)  # the forward pass would be here: let the engine's thread run
    return took * 1e6
