"""WorkerHooks: vLLM's hooks for the worker half, as delegations, and what it asks of the class.

This is to the worker half what connector.py is to the scheduler half. The two share a class because
vLLM makes one connector class play both roles, each in its own process. The vLLM objects that carry
the step plan down and a rank's report up are here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from continuum_connector import build
from continuum_connector.config import ContinuumConfig, load_config
from continuum_connector.errors import TransferError
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Account, timed
from continuum_connector.observe.metrics import ContinuumPromMetrics, ContinuumStats
from continuum_connector.vllm import compat, served, touched
from continuum_connector.vllm.worker_calls import WorkerCalls, find_worker, rank_groups
from continuum_connector.worker.layout import Layout, all_layers, read_layout
from continuum_connector.worker.worker import ContinuumWorker, anyone


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries the step plan down."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries a rank's report up; vLLM adds up the reports of all ranks with `aggregate`."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        self.report.merge(other.report)
        return self


class WorkerHooks(KVConnectorBase_V1):  # type: ignore[misc]
    """`worker` is None on the scheduler's side and where we step aside: nothing is moved then."""

    config: ContinuumConfig
    account: Account
    worker: ContinuumWorker | None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.account = Account(compat.profiler_scope())
        self.worker = None
        self._kv_caches: dict[str, Any] = {}
        self._calls: WorkerCalls | None = None
        self._results = compat.transfer_results()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss, so preemption need not drop output."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ContinuumStats:
        return ContinuumStats.build(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ContinuumPromMetrics:
        return ContinuumPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        config = load_config(compat.our_extra_config(vllm_config.kv_transfer_config))
        return served.wanted_layout(config, vllm_config)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """vLLM <= 0.28: ask for one tensor with the block outermost over all layers."""
        may_copy = served.may_have_tier(self.config, self._vllm_config)
        return may_copy and self.config.kv_layout != "stock"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.worker is None:
            return
        self._kv_caches = kv_caches
        layout = self._layout(self.worker)
        if layout is not None:
            disk = build.disk(self.config, self._vllm_config, self._kv_cache_config)
            self.worker.register(layout, disk)
        if why := touched.why_no_copies():
            self.worker.disable(why)
            return
        of_vllm = find_worker()
        if of_vllm is not None:
            self._calls = WorkerCalls(of_vllm, self.worker.new_weights, self, _on_any_rank)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """vLLM <= 0.28: one tensor for all layers, because of prefer_cross_layer_blocks."""
        self.register_kv_caches(all_layers(kv_cache, self._kv_cache_config))

    def unregister_kv_caches(self) -> None:
        """vLLM >= 0.33 calls it before it takes the KV cache away; `WorkerCalls` always does."""
        if self.worker is not None:
            self.worker.fall_asleep()

    def restore_kv_caches(self) -> None:
        """The same tensors are there again, perhaps at another address."""
        if self.worker is not None:
            layout = self._layout(self.worker)
            if layout is not None:
                self.worker.wake_up(layout)

    def _layout(self, worker: ContinuumWorker) -> Layout | None:
        """Where the blocks lie now. An unproven layout disables the tier, and None is returned."""
        try:
            layout = read_layout(self._kv_caches, self._kv_cache_config)
        except TransferError as error:
            worker.disable(str(error))
            return None
        return layout.padded() if self.config.disk_path else layout

    # --- a step, in vLLM's order. Most bring no order and find nothing in flight: they go through
    # untimed, with a look or two per hook.
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to wait for: stores hold their blocks, and a loading request is not running."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan. It is not kept as vLLM's own method would, because without bound
        metadata vLLM calls no hook for a layer (layers/attention/kv_transfer_utils.py)."""
        worker = self.worker
        if worker is not None and isinstance(connector_metadata, StepMetadata):
            worker.begin(connector_metadata.plan)
            if worker.due is not None:
                self._start_loads(worker)

    @timed("start_load_kv")
    def _start_loads(self, worker: ContinuumWorker) -> None:
        """Here loads wait for block zeroing only; in start_load_kv, which vLLM >= 0.29 calls after
        the forward pass is launched, they would wait for that too."""
        worker.start_loads()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: the loads were submitted when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no request runs before its load has settled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Stores copy whole blocks of finished turns, never a layer at a time."""

    def wait_for_save(self) -> None:
        """Submit the stores and return (law 3)."""
        worker = self.worker
        if worker is not None and worker.due is not None:
            self._submit_stores(worker)

    @timed("wait_for_save")
    def _submit_stores(self, worker: ContinuumWorker) -> None:
        worker.submit_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker is None or self.worker.is_idle:
            return None, None
        finished, _ = self._poll(self.worker)
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self.worker is None or self.worker.is_idle:
            return self._results()
        finished, failed = self._poll(self.worker)
        return self._results(finished_recving=finished, failed_recving=failed)

    @timed("get_finished")
    def _poll(self, worker: ContinuumWorker) -> tuple[set[str], set[str]]:
        return worker.poll()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Bad blocks if there is one KV group; with more, vLLM asks for requests instead."""
        bad = set() if self.worker is None else self.worker.take_bad_blocks()
        is_asked = bad and len(self._kv_cache_config.kv_cache_groups) == 1
        return bad if is_asked else set()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        report = self.worker.take_report() if self.worker is not None else None
        return WorkerMetadata(report) if report is not None else None

    def _end_worker(self) -> None:
        if self._calls is not None:
            self._calls.end()
        if self.worker is not None:
            self.worker.shutdown()


def _on_any_rank(is_so: bool) -> bool:
    return anyone(rank_groups(), is_so)
