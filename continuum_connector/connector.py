"""ContinuumConnector: vLLM's hooks as delegations, first those of the scheduler half, then those of
the worker half.

vLLM makes one class play both roles. Each half exists in its own process (or both in one, at tensor
parallel size 1 on a GPU), so nothing is shared between them but messages; the vLLM objects that
carry the step plan down and a rank's report up are here, too. The scheduler half is told the time
from here.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from continuum_connector import build
from continuum_connector.config import load_config
from continuum_connector.costs import Costs, StepClock
from continuum_connector.errors import TransferError
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import Account, timed
from continuum_connector.observe.metrics import ContinuumPromMetrics, ContinuumStats
from continuum_connector.scheduler.epochs import Cause
from continuum_connector.switch_endpoint import AlwaysOn, SwitchFile, open_switch
from continuum_connector.vllm import compat, coordinator, served, touched
from continuum_connector.vllm.worker_calls import WorkerCalls, find_worker, rank_groups
from continuum_connector.worker.layout import Layout, all_layers, read_layout
from continuum_connector.worker.worker import ContinuumWorker, anyone

if TYPE_CHECKING:
    from continuum_connector.scheduler.scheduler import SchedulerSide

logger = logging.getLogger(f"vllm.{__name__}")

# A scrape comes every few seconds, a step every few ms.
TELL_EVERY_S = 1.0


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


NO_ORDERS = StepMetadata(StepPlan())


class Mode(enum.Enum):
    """What the connector is to vLLM's scheduler; every hook of the scheduler half asks it first."""

    ASIDE = "aside"  # a worker, or this server cannot use us: there is no scheduler half
    OFF = "off"  # an operator said so (`switch_path`): only what was promised is kept
    ATTACHED = "attached"  # vLLM's scheduler is our subclass of it


class ContinuumConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Pins finished turns in VRAM, tiers them to DRAM, and orders waiting turns by program.

    `side` and its parts exist in every mode but ASIDE. In ASIDE and OFF, every hook answers like a
    connector that does nothing. `worker` is None on the scheduler's side and where we step aside:
    nothing is moved then.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.account = Account(compat.profiler_scope())
        self.config, why_aside = build.resolve_config(vllm_config, kv_cache_config)
        self.mode = Mode.ASIDE  # until our scheduler is attached
        self._may_serve = False  # until `role` and why_aside are looked at
        self.side: SchedulerSide = None  # type: ignore[assignment]
        self._on_switch: Callable[[bool], None] = lambda is_on: None
        self.switch: SwitchFile | AlwaysOn = AlwaysOn()
        self._step_clock = StepClock()
        self._tell_at = 0.0
        self._cache_hit_source = compat.cache_hit_source()
        self._clock: Callable[[], float] = time.monotonic
        self._no_orders = NO_ORDERS
        self.worker: ContinuumWorker | None = None
        self._kv_caches: dict[str, Any] = {}
        self._calls: WorkerCalls | None = None
        self._results = compat.transfer_results()
        if role is KVConnectorRole.SCHEDULER:
            if why_aside:
                self._step_aside(why_aside)
                return
            self._may_serve = True
            self.costs = Costs(vllm_config.scheduler_config.max_num_batched_tokens)
            compat.ask_to_recompute(vllm_config)  # whoever made it, maybe without our plugin
            self._wake = compat.find_wake()
        elif not why_aside:
            self.worker = build.worker(self.config, vllm_config)

    def _step_aside(self, why: str) -> None:
        """Leave this server to stock vLLM, for good."""
        logger.warning("ContinuumConnector steps aside: %s", why)
        self._may_serve = False
        self.account.gauge("switched_on", 0.0)
        self.account.gauge("aside", 1.0)

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Take time from elsewhere, in monotonic seconds: for tests and simulations."""
        self._clock = clock

    # --- both halves ------------------------------------------------------------------
    def get_kv_connector_stats(self) -> ContinuumStats | None:
        """Return what changed in the last second. Once the last turn has ended, return what each
        step changed, because the next step may be far off; a worker, which knows no turns, keeps
        for that step how long its hooks took. This is the only hook that update_from_output calls
        in every step (v1/core/sched/scheduler.py)."""
        now, is_last = self._clock(), False
        if self.mode is not Mode.ASIDE:
            step = self._step_clock.done(now)
            if step is not None:
                self.costs.step(*step)
            is_last = not self.side.turns and self.mode is not Mode.OFF
        if now < self._tell_at and not is_last:
            return None
        self._tell_at = now + TELL_EVERY_S
        if self.mode is not Mode.ASIDE:
            for gauge in self.costs.gauges(now):
                self.account.gauge(*gauge)
            self.side.update_gauges()
        return ContinuumStats.take(self.account)

    def shutdown(self) -> None:
        if self.side is not None:
            self.switch.close()
            self._steps.shutdown(self._clock())
        if self._calls is not None:
            self._calls.end()
        if self.worker is not None:
            self.worker.shutdown()

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

    # --- scheduler half, in the order the engine calls it -------------------------------
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        if self._may_serve:
            self._bind(kv_cache_manager.block_pool, kv_cache_manager.coordinator)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # vLLM < 0.30 calls this alone
        found = coordinator.find(gpu_block_pool)
        if compat.takes_longest_hit():
            coordinator.hit_in_all_groups(found)
        if self._may_serve:
            self._bind(gpu_block_pool, found)

    def ensure_bound(self) -> bool:
        """Call once vLLM's scheduler is built: if it has bound no blocks to us, we step aside."""
        if self.side is None and self._may_serve:
            self._step_aside(build.NEVER_BOUND.format(touched.release()))
        return self.side is not None

    def _bind(self, gpu_block_pool: Any, found: Any) -> None:
        self.side = side = build.scheduler_side(
            self.config,
            self._vllm_config,
            self._kv_cache_config,
            (gpu_block_pool, found),
            self.account,
            self.costs,
            self._wake,
        )
        self._steps, self._tier = side.steps, side.tier
        self._epochs = self._steps.epochs
        self.switch = open_switch(self.config.switch_path, self._wake)

    @property
    def is_on(self) -> bool:
        """Whether the connector acts: it is neither aside nor switched off. (Our hooks that vLLM
        calls for each turn look at `mode` themselves, which is a call less.)"""
        return self.mode is Mode.ATTACHED

    def attached(self, base: str, on_switch: Callable[[bool], None] | None) -> None:
        """The scheduler subclass is in place: pins yield inside allocations. `on_switch` is told
        of each switch, before the scheduler half is."""
        self.mode = Mode.ATTACHED
        self._on_switch = on_switch or self._on_switch
        order = "in program order" if self.side.orders else "in vLLM's order"
        logger.info("ContinuumConnector attached to %s: pins yield, turns wait %s", base, order)

    def end_program(self, key: str) -> bool:
        """End a program for an operator; False if we do not know it (scheduler subclass only)."""
        return self.side.end_program(key, self._clock())

    @timed("on_new_request")
    def before_queued(self, request: Any) -> None:
        """Name the request's program before it is queued (scheduler subclass only)."""
        self.side.begin_turn(request, self._clock())

    def let_in(self, num_idle: int) -> None:
        """Before a step: show vLLM the turns that need not wait any more; `num_idle` turns wait for
        their client (scheduler subclass only)."""
        self.side.waits.let_in(num_idle, self._clock())

    def let_all_in(self) -> None:
        """Show vLLM all turns (scheduler subclass only)."""
        self.side.waits.let_all_in(self._clock())

    def rank(self, request: Any, by_priority: bool) -> tuple[Any, ...]:
        """A waiting request's place in the queue; the user's priority first, if in force."""
        rank = self.side.rank(request, compat.is_preempted(request))
        lacks_kv = not compat.holds_kv(request)
        return (lacks_kv, request.priority, *rank) if by_priority else (lacks_kv, *rank)

    @timed("get_num_new_matched_tokens")
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.mode is not Mode.ATTACHED:
            if self._may_serve and self.mode is Mode.ASIDE and self.ensure_bound():
                self._step_aside(build.NOT_ATTACHED)
            return 0, False
        found = self.side.match(request, num_computed_tokens, self._clock())
        # It may read no cache, as with prompt_logprobs. vLLM < 0.30 asks us all the same.
        return (0, False) if request.skip_reading_prefix_cache else found

    @timed("allocate_slots")
    def make_room(
        self, request: Any, attempt: Callable[[], Any], need: int, others_run: bool
    ) -> Any:
        """An allocation failed: ask again while pins give way (scheduler subclass only)."""
        return self.side.make_room(request, attempt, need, others_run, self._clock())

    def has_pending_block_frees(self) -> bool:
        return self.is_on and self.side.waits_for_store(self._clock())

    @timed("update_state_after_alloc")
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.mode is Mode.ASIDE:
            return
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        if self.mode is Mode.ATTACHED:
            self.side.after_alloc(request, block_ids, num_external_tokens, self._clock())
        elif num_external_tokens:  # promised before the switch (vLLM >= 0.33 starts loads late)
            self._tier.load("", request, block_ids, num_external_tokens, self._clock())

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Most steps only decode; they cost a look at the clock and a look at what is due."""
        if self.mode is Mode.ASIDE:
            return NO_ORDERS
        now = self._clock()
        work = compat.step_work(scheduler_output, self._step_clock.skips_decodes)
        self._step_clock.scheduled(work, now)
        if (
            self._steps.is_idle(now)
            and not self._is_switch_due
            and not compat.preempted_ids(scheduler_output)
        ):
            if self._no_orders.plan.epoch != self._epochs.number:
                self._no_orders = StepMetadata(StepPlan(epoch=self._epochs.number))
            return self._no_orders
        return self._plan(scheduler_output, now)

    @timed("build_connector_meta")
    def _plan(self, scheduler_output: Any, now: float) -> StepMetadata:
        self._follow_switch(now)
        for request_id in compat.preempted_ids(scheduler_output):
            self.side.note_preempted(request_id, now)
        self.side.waits.bus.count(now)
        return StepMetadata(self._steps.plan(now))

    def update_connector_output(self, connector_output: Any) -> None:
        if self.mode is Mode.ASIDE:
            return
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self._settle(meta.report)

    @timed("update_connector_output")
    def _settle(self, report: WorkerReport) -> None:
        self._steps.settle(report, self._clock())
        if self.mode is Mode.OFF:
            self._tell_at = 0.0  # a later step that could publish it may never come

    @timed("request_finished")
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delay the free: our own references keep what we want."""
        if self.mode is Mode.ASIDE:
            return False, None
        end = compat.turn_end(request)
        return False, self.side.finish(request, block_ids, end, self._clock())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """True only while copies are to settle, a pin is due or the switch was turned: at other
        times it would burn a core."""
        if self.mode is Mode.ASIDE:
            return False
        return self._is_switch_due or self._steps.has_work(self._clock())

    @property
    def _is_switch_due(self) -> bool:
        return self.switch.is_on is (self.mode is Mode.OFF)

    def _follow_switch(self, now: float) -> None:
        """Do as the switch says. Called once a step is put together: no admission is half done."""
        if not self._is_switch_due:
            return
        is_on = self.mode is Mode.OFF
        self.mode = Mode.ATTACHED if is_on else Mode.OFF
        self._on_switch(is_on)
        self.side.switch(is_on, now)
        self._tell_at = 0.0
        logger.warning(build.SWITCHED_ON if is_on else build.SWITCHED_OFF)

    def take_events(self) -> Iterable[Any]:
        return () if self.mode is Mode.ASIDE else self._tier.take_events()

    def reset_cache(self) -> bool:
        """Begin an epoch. vLLM's own cache may be empty already, or is next (vllm/resets.py)."""
        if self.mode is not Mode.ASIDE:
            self.begin_epoch()
        return True

    def begin_epoch(self, name: str = "", is_version: bool = False) -> None:
        """Other weights serve from now on; `name`: theirs (scheduler subclass only)."""
        cause = Cause.VERSION if is_version else Cause.RESET
        self._steps.new_epoch(cause, self._clock(), name)

    # --- worker half ------------------------------------------------------------------
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


def _on_any_rank(is_so: bool) -> bool:
    return anyone(rank_groups(), is_so)
