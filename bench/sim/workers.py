"""The worker half, modelled: what a connector's scheduler half asks to be copied takes its time.

One class per kind of metadata. Bytes do not exist here, only how long they travel; who may read
which block when is for tests/vllm, whose fake worker checks every one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bench.sim.bus import Bus, Copy, Disk, Way
from continuum_connector.messages import TransferOutcome, WorkerReport


class Worker:
    """What the lab needs of a worker half. This one has nothing to copy: there is no connector."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def start(self, step: Any, now: float, end: float) -> float:
        """Submit what the step's metadata asks for; it was scheduled at `now` and computes until
        `end`. Returns the seconds by which copies make the step longer, 0 if they do not."""
        return 0.0

    def output(self, now: float) -> dict[str, Any]:
        """Return and forget what has settled by `now`, as arguments of KVConnectorOutput."""
        return {}

    def next_done(self) -> float:
        """When the next transfer settles; infinite if none is under way."""
        return math.inf


@dataclass
class _Transfer:
    transfer_id: int
    copy: Copy
    request_id: str = ""  # that a load is for


@dataclass
class OurWorker(Worker):
    """ContinuumWorker: StepPlan down, WorkerReport up; no step ever waits for a copy.

    Of a disk it is told how many slots there are; reads go first (csrc's threads). What is taken
    back before it began is not copied; of loads, none is.
    """

    bus: Bus
    block_bytes: int
    num_slots: int
    disk: Disk | None = None
    num_disk_slots: int = 0
    _pending: list[_Transfer] = field(default_factory=list)
    _report: WorkerReport = field(default_factory=WorkerReport)

    def __post_init__(self) -> None:
        if self.num_slots:
            self._report.ready_slots[0] = self.num_slots
        if self.disk is not None and self.num_disk_slots:
            self.disk.reads_first = True
            self._report.disk_slots[0] = self.num_disk_slots
            self._report.disk_scanned.add(0)

    def start(self, step: Any, now: float, end: float) -> float:
        plan = step.kv_connector_metadata.plan
        self._cancel(set(plan.cancels), now)
        for load in plan.loads:
            self._submit(Way.LOAD, load, now, now, load.request_id)
        for store in plan.stores:
            self._submit(Way.STORE, store, now, end)
        for way, orders in ((Way.READ, plan.reads), (Way.WRITE, plan.writes)):
            for order in orders:
                self._on_disk(way, order, now)
        return 0.0

    def _submit(
        self, way: Way, order: Any, now: float, not_before: float, request_id: str = ""
    ) -> None:
        num_bytes = len(order.blocks) * self.block_bytes
        copy = self.bus.submit(way, num_bytes, now, not_before)
        self._pending.append(_Transfer(order.transfer_id, copy, request_id))

    def _on_disk(self, way: Way, order: Any, now: float) -> None:
        """A disk slot travels whole, also the blocks of it that DRAM has."""
        assert self.disk is not None  # no slots of one were reported
        copy = self.disk.submit(way, len(order.slots) * self.block_bytes, now)
        self._pending.append(_Transfer(order.transfer_id, copy))

    def _cancel(self, unwanted: set[int], now: float) -> None:
        if self.disk is None or not unwanted:
            return
        self.disk.advance(now)
        for each in [each for each in self._pending if each.transfer_id in unwanted]:
            if each.copy.way in (Way.READ, Way.WRITE) and self.disk.cancel(each.copy):
                self._pending.remove(each)
                outcome = TransferOutcome(num_failed=1, reasons=("cancelled",))
                self._report.outcomes[each.transfer_id] = outcome

    def output(self, now: float) -> dict[str, Any]:
        from continuum_connector.connector import WorkerMetadata  # which imports vLLM

        self.bus.advance(now)
        if self.disk is not None:
            self.disk.advance(now)
        settled = [each for each in self._pending if each.copy.done <= now]
        if settled:
            self._pending = [each for each in self._pending if each.copy.done > now]
        for each in settled:
            seconds = each.copy.done - each.copy.began  # as csrc's engine counts them
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
        if not self._pending:
            return math.inf
        return min(link.next_done() for link in (self.bus, self.disk) if link is not None)
