"""The worker half, modelled: what a connector's scheduler half asks to be copied takes its time.

One class per kind of metadata: ours, and those of vLLM's two connectors, with which a step waits
for copies only where a preempted request's blocks are about to be reused. Bytes do not exist here,
only how long they travel; who may read which block when is for tests/vllm, whose fake worker checks
every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


# --- the workers of vLLM's own connectors -----------------------------------------------------
@dataclass
class SimpleWorker(Worker):
    """SimpleCPUOffloadWorker: a load and a store at most per step, each an event."""

    bus: Bus
    block_bytes: int
    _loads: dict[int, Copy] = field(default_factory=dict)  # event -> its copy
    _stores: dict[int, Copy] = field(default_factory=dict)
    _requests: dict[int, list[str]] = field(default_factory=dict)  # event -> who waits for it

    def start(self, step: Any, now: float, end: float) -> float:
        plan = step.kv_connector_metadata
        flush_s = 0.0
        if plan.need_flush:
            flush_s = _wait(self.bus, (*self._loads.values(), *self._stores.values()), now)
            now, end = now + flush_s, end + flush_s
        if plan.load_gpu_blocks:
            self._requests[plan.load_event] = plan.load_event_to_reqs[plan.load_event]
            self._loads[plan.load_event] = self._copy(Way.LOAD, plan.load_gpu_blocks, now, now)
        if plan.store_gpu_blocks:
            self._stores[plan.store_event] = self._copy(Way.STORE, plan.store_gpu_blocks, now, end)
        return flush_s

    def _copy(self, way: Way, blocks: list[int], now: float, not_before: float) -> Copy:
        return self.bus.submit(way, len(blocks) * self.block_bytes, now, not_before)

    def output(self, now: float) -> dict[str, Any]:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        self.bus.advance(now)
        output: dict[str, Any] = {}
        received = {each for event in _take(self._loads, now) for each in self._requests.pop(event)}
        if received:
            output["finished_recving"] = received
        if stored := _take(self._stores, now):
            meta = SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stored, 1))
            output["kv_connector_worker_meta"] = meta
        return output

    def next_done(self) -> float:
        return self.bus.next_done() if self._loads or self._stores else math.inf


@dataclass
class OffloadingWorker(Worker):
    """OffloadingConnectorWorker: jobs; a store is submitted when the next step begins."""

    bus: Bus
    block_bytes: int
    _jobs: dict[int, Copy] = field(default_factory=dict)
    _requests: dict[int, str] = field(default_factory=dict)  # load -> who waits for it
    _deferred: dict[int, Any] = field(default_factory=dict)  # stores of the last step

    def start(self, step: Any, now: float, end: float) -> float:
        plan = step.kv_connector_metadata
        flush = plan.jobs_to_flush or ()
        stores = {job: each for job, each in plan.store_jobs.items() if job not in flush}
        self._deferred |= {job: plan.store_jobs[job] for job in flush if job in plan.store_jobs}
        for job, each in self._deferred.items():
            self._submit(Way.STORE, job, each.src_spec, now)
        self._deferred = stores
        flush_s = _wait(self.bus, [self._jobs[job] for job in flush if job in self._jobs], now)
        for job, each in plan.load_jobs.items():
            self._requests[job] = each.req_id
            self._submit(Way.LOAD, job, each.dst_spec, now + flush_s)
        return flush_s

    def _submit(self, way: Way, job: int, in_vram: Any, now: float) -> None:
        num_bytes = len(in_vram.block_ids) * self.block_bytes
        self._jobs[job] = self.bus.submit(way, num_bytes, now)

    def output(self, now: float) -> dict[str, Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        self.bus.advance(now)
        done = _take(self._jobs, now)
        if not done:
            return {}
        output: dict[str, Any] = {
            "kv_connector_worker_meta": OffloadingWorkerMetadata(dict.fromkeys(done, 1))
        }
        received = {self._requests.pop(job) for job in done if job in self._requests}
        if received:
            output["finished_recving"] = received
        return output

    def next_done(self) -> float:
        return self.bus.next_done() if self._jobs else math.inf


def _take(copies: dict[int, Copy], now: float) -> list[int]:
    """Remove and return those that are done by `now`, in the order of their submission."""
    done = [key for key, copy in copies.items() if copy.done <= now]
    for key in done:
        del copies[key]
    return done


def _wait(bus: Bus, copies: Iterable[Copy], now: float) -> float:
    """Let the bus run until the copies are done; return how many seconds after `now` that is."""
    until = now
    for copy in copies:
        while math.isinf(copy.done):
            bus.advance(bus.next_done())
        until = max(until, copy.done)
    return until - now
