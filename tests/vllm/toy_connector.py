"""ToyConnector: the shortest connector that stores and loads, to test the harness with.

It stores the full blocks of every finished request and loads on a hit; it never evicts,
pins or gives up. `StepMetadata.plan` and `WorkerMetadata.report` are named as in
continuum_connector.connector: they are what FakeWorker relies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from continuum_connector.messages import LoadOrder, StepPlan, StoreOrder, WorkerReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    report: WorkerReport

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.report.merge(other.report))


class ToyConnector(KVConnectorBase_V1, SupportsHMA):
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_size = specs[0].block_size
        self.windows = [getattr(spec, "sliding_window", None) for spec in specs]
        self.world_size = vllm_config.kv_transfer_config.kv_connector_extra_config["world_size"]
        self.ready: dict[tuple[int, bytes], int] = {}
        self.slots: dict[tuple[int, bytes], int] = {}
        self.hits: dict[str, tuple[int, int]] = {}  # block range to load
        self.loading: set[str] = set()
        self.failed: set[str] = set()
        self.in_flight: dict[int, tuple[list[Any], list[Any], int]] = {}  # blocks, keys, ranks
        self.queued: list[Any] = []
        self.num_transfers = 0

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        first, hashes = num_computed // self.block_size, request.block_hashes
        if request.request_id in self.failed:
            return 0, False
        for end in range((request.num_tokens - 1) // self.block_size, first, -1):
            if all(
                (group, hashes[i]) in self.ready
                for group in range(len(self.windows))
                for i in range(max(first, self._first(group, end)), end)
            ):
                self.hits[request.request_id] = first, end
                return (end - first) * self.block_size, True
        return 0, False

    def _first(self, group: int, end: int) -> int:
        """Return the first block that a token after block `end` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, end - -(-window // self.block_size))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if not num_external:
            return
        tables = blocks.get_block_ids()
        first, end = self.hits[request.request_id]  # num_computed_tokens is not set yet
        pairs = [
            (tables[group][i], self.ready[group, request.block_hashes[i]])
            for group in range(len(tables))
            for i in range(max(first, self._first(group, end)), end)
        ]
        self.loading.add(request.request_id)
        self.queued.append(LoadOrder(self._next_id(), request.request_id, *_columns(pairs)))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        if request.request_id in self.loading:  # nothing of it was computed
            return False, None
        num_full = min(len(request.block_hashes), (request.num_tokens - 1) // self.block_size)
        pairs, keys = [], []
        for group, ids in enumerate(block_ids):
            for key, block in zip(request.block_hashes[:num_full], ids, strict=False):
                if block and (group, key) not in self.slots:
                    slot = self.slots[group, key] = len(self.slots)
                    pairs.append((block, slot))
                    keys.append((group, key))
        if pairs:
            order = StoreOrder(self._next_id(), *_columns(pairs))
            held = [self.pool.blocks[block] for block, _ in pairs]
            self.pool.touch(held)
            self.in_flight[order.transfer_id] = (held, keys, self.world_size)
            self.queued.append(order)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, _scheduler_output: Any) -> StepMetadata:
        queued, self.queued = self.queued, []
        loads = tuple(order for order in queued if isinstance(order, LoadOrder))
        stores = tuple(order for order in queued if isinstance(order, StoreOrder))
        return StepMetadata(StepPlan(loads, stores))

    def update_connector_output(self, output: Any) -> None:
        self.loading -= output.finished_recving or set()
        self.failed |= getattr(output, "failed_recving", None) or set()
        meta = output.kv_connector_worker_meta
        for transfer_id, outcome in meta.report.outcomes.items() if meta else ():
            if transfer_id not in self.in_flight:
                continue  # a load
            held, keys, missing = self.in_flight.pop(transfer_id)
            if missing > outcome.num_ranks:
                self.in_flight[transfer_id] = held, keys, missing - outcome.num_ranks
                continue
            self.pool.free_blocks(held)
            if not outcome.num_failed:
                self.ready |= {key: self.slots[key] for key in keys}

    def has_pending_push_work(self) -> bool:
        return bool(self.in_flight or self.queued)

    def _next_id(self) -> int:
        self.num_transfers += 1
        return self.num_transfers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def _columns(pairs: list[tuple[int, int]]) -> tuple[Any, Any]:
    blocks, slots = zip(*pairs, strict=True)
    return np.array(blocks, np.int32), np.array(slots, np.int32)
