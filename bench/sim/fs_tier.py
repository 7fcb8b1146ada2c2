"""vLLM's tiering with its `fs` tier, in virtual time: its scheduler half, a modelled drive.

Real: OffloadingConnectorScheduler, TieringOffloadingManager, the primary tier and its eviction,
AsyncLookupManager. Modelled: FileSystemTierManager, which keeps a file per chunk on 32 threads:
here a job is one copy on the lab's disk, at its full rate and of any number of files, which
flatters it, and no chunk ever leaves, as there. A lookup is answered by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering import spec
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from bench.sim.bus import Copy, Disk, Way

TIER = "fs on the lab's disk"


class TieringSpec(spec.TieringOffloadingSpec):
    """The spec without its memory, which would be as large as the machine's DRAM."""

    def get_manager(self) -> Any:
        with mock.patch.object(spec, "SharedOffloadRegion", _Region):
            return super().get_manager()


class _Region:
    """What stands for a SharedOffloadRegion: the size of a chunk is all that is read of it."""

    def __init__(self, **sizes: Any) -> None:
        self._chunk_bytes = sizes.get("kv_bytes_per_chunk") or sizes["kv_bytes_per_block"]

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(np.empty((1, self._chunk_bytes), np.int8))  # untouched: no memory

    def cleanup(self) -> None: ...


class _Lookups(AsyncLookupManager):
    """Its thread's work is done where it would be woken, so that every run is the same."""

    def __init__(self, stored: set[Any]) -> None:
        super().__init__(tier_type=TIER)
        self._lookup_queue.put(None)
        self._thread.join()
        self._stored = stored

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        return [key in self._stored for key in keys]

    def flush(self) -> None:
        super().flush()
        self._lookup_queue.put(None)  # the end of what the thread would find
        self._worker()

    def shutdown(self) -> None: ...


class FsTier(SecondaryTierManager):
    """FileSystemTierManager's answers, over the lab's disk once `use` has said which."""

    medium = FileSystemTierManager.medium

    def __init__(self, primary_kv_view: memoryview, **said: Any) -> None:
        super().__init__(primary_kv_view=primary_kv_view, **said)
        assert primary_kv_view.strides is not None
        self._chunk_bytes = primary_kv_view.strides[0]
        self._stored: set[Any] = set()
        self._lookups = _Lookups(self._stored)
        self._jobs: dict[int, tuple[Copy, list[Any]]] = {}
        self._disk: Disk
        self._clock: Callable[[], float]

    def use(self, disk: Disk, clock: Callable[[], float]) -> None:
        self._disk, self._clock = disk, clock

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(Way.WRITE, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(Way.READ, job_metadata)

    def _submit(self, way: Way, job: Any) -> None:
        keys = list(job.keys)
        num_copied = len(keys)
        if way is Way.WRITE:  # fs/io.py leaves a file alone that is there
            num_copied = sum(key not in self._stored for key in keys)
        copy = self._disk.submit(way, num_copied * self._chunk_bytes, self._clock())
        self._jobs[job.job_id] = copy, keys

    def get_finished_jobs(self) -> Iterable[JobResult]:
        now = self._clock()
        self._disk.advance(now)
        for job_id, (copy, keys) in list(self._jobs.items()):
            if copy.done <= now:
                del self._jobs[job_id]
                if copy.way is Way.WRITE:
                    self._stored.update(keys)
                yield JobResult(job_id, True)

    def drain_jobs(self) -> None:
        assert not self._jobs, "the lab resets no cache"

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()


SecondaryTierFactory.register_tier(TIER, __name__, FsTier.__name__)
