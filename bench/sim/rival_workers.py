"""The worker halves of others, modelled, as workers.py models ours.

vLLM's two connectors copy asynchronously: a step waits for copies only where a preempted
request's blocks are about to be reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.sim.bus import Bus, Copy, Disk, Way
from bench.sim.workers import Worker


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


@dataclass
class TieringWorker(OffloadingWorker):
    """The same; between DRAM and disk the scheduler half copies by itself (fs_tier.py)."""

    disk: Disk = field(kw_only=True)

    def next_done(self) -> float:
        return min(super().next_done(), self.disk.next_done())


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
