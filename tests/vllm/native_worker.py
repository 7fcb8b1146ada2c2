"""NativeWorker: the oracle's rank with our real worker half and copy engine in it.

What is copied are bytes of no meaning, by csrc/ over its simulated driver; when and how each
transfer ends, and what vLLM hears of it, is what `ContinuumWorker` says. The oracle follows that,
so a request that is told of a load too early, or computed while a copy may still write, is found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import StepPlan, TransferOutcome, WorkerReport
from continuum_connector.worker.abi import Direction, Region, find_library
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import poll
from tests.native import sim
from tests.vllm.fake_worker import FakeWorker
from tests.vllm.harness import Engine
from tests.vllm.tiering import tiered

_PIECE = 64  # bytes of a block


class NativeWorker(FakeWorker):
    """A rank of `num_blocks` and `num_slots`. `patient`: each step waits for the copies under way,
    so that a test does not depend on how fast they are; not while they are held."""

    engine_type = NativeEngine

    def __init__(self, fake: FakeWorker, num_blocks: int, num_slots: int) -> None:
        super().__init__(fake.groups, hold=True, rank=fake.rank)
        self.patient = True
        config = ContinuumConfig(dram_bytes=num_slots * _PIECE)
        self.worker = ContinuumWorker(self._make, config, rank=fake.rank)
        self._vram = np.zeros(num_blocks * _PIECE, np.uint8)
        region = Region(self._vram.ctypes.data, _PIECE, 0, _PIECE)
        self.worker.register(Layout((region,), num_blocks, _PIECE, "cpu", 0))

    def _make(self, layout: Layout, num_slots: int) -> NativeEngine:
        self.engine = self.engine_type("sim", layout, num_slots)
        return self.engine

    def execute(self, step: Any) -> dict[str, list[int]]:
        self.worker.begin(getattr(step.kv_connector_metadata, "plan", None) or StepPlan())
        self.worker.start_loads()
        sampled = super().execute(step)
        self.worker.submit_stores()
        return sampled

    def take_connector_output(self) -> dict[str, Any]:
        for tag in self.worker._in_flight if self.patient else ():
            assert self.engine.wait(tag, 20.0)
        finished, failed = poll(self.worker)
        bad_blocks = self.worker.take_bad_blocks()
        report = self.worker.take_report() or WorkerReport()
        for transfer_id, outcome in report.outcomes.items():
            if transfer_id in self.pending:
                self.settle(transfer_id) if outcome.num_done else self.fail(transfer_id)
        self._received, self._failed_loads, self._invalid_blocks = finished, failed, bad_blocks
        self._report = report
        return super().take_connector_output()

    def hold_copies(self) -> None:
        """Copies that the driver gets from here on do not end."""
        sim.hold(self.engine)
        self.patient = False

    def end_copies(self) -> None:
        """They end, and each step waits for its own again."""
        sim.release(self.engine)
        self.patient = True

    def stop(self) -> None:
        """Let copies end that are held, and stop; the engine may be closed already."""
        if self.worker._engine is not None:
            sim.release(self.engine)
        self.worker.shutdown()

    def num_calls(self, direction: Direction) -> int:
        """Copy calls that the driver got so far."""
        return int(sim.stats(self.engine).num_copy_calls[direction.value])

    def wait_until_issued(self, direction: Direction, before: int) -> None:
        """Until the driver has more than `before`: that copy no cancel takes back."""
        while self.num_calls(direction) == before:
            os.sched_yield()

    def _cancel(self, transfer_id: int) -> None:
        """The real worker does."""

    def _note(self, transfer: Any, outcome: TransferOutcome) -> None:
        """The real worker does."""


@contextlib.contextmanager
def native_engines(
    num_slots: int, kind: type[NativeWorker] = NativeWorker
) -> Iterator[Callable[..., Engine]]:
    """Builds engines with real workers, and closes them; skips without the native library."""
    try:
        find_library()
    except TransferError as error:
        pytest.skip(str(error))
    made: list[NativeWorker] = []

    def build(**kwargs: Any) -> Engine:
        engine = tiered(num_slots=num_slots, **kwargs)
        num_blocks = engine.pool.num_gpu_blocks
        engine.workers[:] = [kind(each, num_blocks, num_slots) for each in engine.workers]
        made.extend(engine.workers)
        return engine

    yield build
    for worker in made:
        worker.stop()
