"""The worker half, modelled: what a connector's scheduler half asks to be copied takes its time.

One class per kind of metadata. Bytes do not exist here, only how long they travel; who may read
which block when is for tests/vllm, whose fake worker checks every one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.sim.bus import Bus, Copy, Way
from continuum_connector.messages import TransferOutcome, WorkerReport


class Worker(Protocol):
    """What the lab needs of a worker half."""

    bus: Bus

    def start(self, step: Any, now: float, end: float) -> float:
        """Submit what the step's metadata asks for; it was scheduled at `now` and computes until
        `end`. Returns the seconds by which copies make the step longer, 0 if they do not."""
        ...

    def output(self, now: float) -> dict[str, Any]:
        """Return and forget what has settled by `now`, as arguments of KVConnectorOutput."""
        ...

    def next_done(self) -> float:
        """When the next transfer settles; infinite if none is under way."""
        ...


class NoWorker:
    """Without a connector there is nothing to copy."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def start(self, step: Any, now: float, end: float) -> float:
        return 0.0

    def output(self, now: float) -> dict[str, Any]:
        return {}

    def next_done(self) -> float:
        return math.inf


@dataclass
class _Transfer:
    transfer_id: int
    copy: Copy
    request_id: str = ""  # that waits for it; "": a store


@dataclass
class OurWorker:
    """ContinuumWorker: StepPlan down, WorkerReport up; no step ever waits for a copy."""

    bus: Bus
    block_bytes: int
    num_slots: int
    _pending: list[_Transfer] = field(default_factory=list)
    _report: WorkerReport = field(default_factory=WorkerReport)
    _received: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.num_slots:
            self._report.ready_slots[0] = self.num_slots

    def start(self, step: Any, now: float, end: float) -> float:
        plan = step.kv_connector_metadata.plan
        for load in plan.loads:
            self._submit(Way.LOAD, load, now, now, load.request_id)
        for store in plan.stores:
            self._submit(Way.STORE, store, now, end)
        return 0.0

    def _submit(
        self, way: Way, order: Any, now: float, not_before: float, request_id: str = ""
    ) -> None:
        num_bytes = len(order.blocks) * self.block_bytes
        copy = self.bus.submit(way, num_bytes, now, not_before)
        self._pending.append(_Transfer(order.transfer_id, copy, request_id))

    def output(self, now: float) -> dict[str, Any]:
        from continuum_connector.vllm.carriers import WorkerMetadata  # which imports vLLM

        self.bus.advance(now)
        settled = [each for each in self._pending if each.copy.done <= now]
        if settled:
            self._pending = [each for each in self._pending if each.copy.done > now]
        for each in settled:
            seconds = each.copy.done - each.copy.submitted
            outcome = TransferOutcome(
                num_done=1, num_bytes=int(each.copy.num_bytes), seconds=seconds
            )
            self._report.outcomes[each.transfer_id] = outcome
        loading = {each.request_id for each in self._pending}
        received = {s.request_id for s in settled if s.request_id and s.request_id not in loading}
        output: dict[str, Any] = {"finished_recving": received} if received else {}
        if not self._report.is_empty:
            output["kv_connector_worker_meta"] = WorkerMetadata(self._report)
            self._report = WorkerReport()
        return output

    def next_done(self) -> float:
        return self.bus.next_done() if self._pending else math.inf
