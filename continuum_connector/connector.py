"""ContinuumConnector: vLLM's hooks as delegations; those of the worker half are inherited.

The only file that reads the clock. Each half exists in its own process (or both in one, at
tensor parallel size 1 on a GPU), so nothing is shared between them but messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    SupportsHMA,
)

from continuum_connector import build
from continuum_connector.config import load_config
from continuum_connector.costs.costs import Costs
from continuum_connector.costs.step_clock import StepClock
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.observe.account import timed
from continuum_connector.observe.metrics import ContinuumPromMetrics, ContinuumStats
from continuum_connector.switch import AlwaysOn, SwitchFile, open_switch
from continuum_connector.vllm import compat, proven
from continuum_connector.vllm.carriers import StepMetadata, WorkerMetadata
from continuum_connector.worker_hooks import WorkerHooks

if TYPE_CHECKING:
    from continuum_connector.scheduler.scheduler import SchedulerSide

logger = compat.logger(__name__)

# A scrape comes every few seconds, a step every few ms.
TELL_EVERY_S = 1.0
NO_ORDERS = StepMetadata(StepPlan())


class ContinuumConnector(WorkerHooks, SupportsHMA):  # type: ignore[misc]
    """Pins finished turns in VRAM, tiers them to DRAM, and orders waiting turns by program.

    `side` is None on workers and where we step aside (no prefix caching, unproven model).
    `acting` is the same, and None while an operator has switched us off (`switch_path`): then
    every hook answers what a connector that does nothing would.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = load_config(compat.our_extra_config(vllm_config.kv_transfer_config))
        self.side: SchedulerSide | None = None
        self.acting: SchedulerSide | None = None
        self.on_switch: Callable[[bool], None] = lambda is_on: None  # attach.py has more to do
        self.switch: SwitchFile | AlwaysOn = AlwaysOn()
        self.costs = Costs(vllm_config.scheduler_config.max_num_batched_tokens)
        self._step_clock = StepClock()
        self._tell_at = 0.0
        self._cache_hit_source = compat.cache_hit_source()
        self._clock: Callable[[], float] = time.monotonic
        self._aside = build.reason_to_step_aside(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            if self._aside:
                logger.warning("ContinuumConnector steps aside: %s", self._aside)
                self.account.gauge("switched_on", 0.0)
            compat.ask_to_recompute(vllm_config)
            self._wake = compat.find_wake()
        elif not self._aside:
            self.worker = build.worker(self.config, vllm_config)
        self._is_attached = self._has_warned = False

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Take time from elsewhere, in monotonic seconds: tests and simulations."""
        self._clock = clock

    # --- both halves ------------------------------------------------------------------
    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss, so preemption need not drop output."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        config = load_config(compat.our_extra_config(vllm_config.kv_transfer_config))
        return compat.wanted_layout(config.kv_layout, config.dram_bytes > 0)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """vLLM <= 0.28: ask for one tensor with the block outermost over all layers."""
        return self.config.dram_bytes > 0 and self.config.kv_layout != "stock"

    def get_kv_connector_stats(self) -> ContinuumStats | None:
        """What changed, of a step in which something happened; levels once a second, and when the
        last turn ends, for then no step may follow for long. It is the one hook that
        update_from_output calls in every step (v1/core/sched/scheduler.py)."""
        side = self.side
        if side is not None:
            now = self._clock()
            step = self._step_clock.done(now)
            if step is not None:
                self.costs.step(*step)
            is_last = not side.turns and self.acting is not None
            if now >= self._tell_at or is_last:
                self._tell_at = now + TELL_EVERY_S
                side.update_gauges()
                for gauge in self.costs.gauges(now):
                    self.account.gauge(*gauge)
            elif side.is_idle(now):
                return None
            side.levels.update_ledger(self.account)
        return ContinuumStats.take(self.account)

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

    def shutdown(self) -> None:
        if self.side is not None:
            self.switch.close()
            self.side.shutdown(self._clock())
        if self.worker is not None:
            self.worker.shutdown()

    # --- scheduler half, in the order the engine calls it -------------------------------
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._aside or self._role is not KVConnectorRole.SCHEDULER:
            return
        self.side = self.acting = build.scheduler_side(
            self.config,
            self._vllm_config,
            self._kv_cache_config,
            gpu_block_pool,
            self.account,
            self.costs,
            self._wake,
        )
        self.switch = open_switch(self.config.switch_path, self._wake)

    @property
    def orders(self) -> bool:
        """Whether turns wait in program order: config and policy must both want it."""
        return self.config.order and self.side is not None and self.side.decider.policy.orders

    def attached(self, base: str) -> None:
        """The scheduler subclass is in place: pins yield inside allocations."""
        self._is_attached = True
        order = "in program order" if self.orders else "in vLLM's order"
        logger.info("ContinuumConnector attached to %s: pins yield, turns wait %s", base, order)

    @timed("on_new_request")
    def before_queued(self, request: Any) -> None:
        """Name the request's program before it is queued (scheduler subclass only)."""
        assert self.side is not None
        self.side.begin_turn(request, self._clock())

    def on_new_request(self, request: Any) -> None:
        if self.acting is not None and not self._is_attached:  # else `before_queued` did it
            self._begin_unattached(request)

    @timed("on_new_request")
    def _begin_unattached(self, request: Any) -> None:
        assert self.side is not None
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                proven.why_unattached(self.config, self._vllm_config.scheduler_config.scheduler_cls)
            )
            if compat.starves_loaded(self._vllm_config):
                logger.warning(proven.NO_UNATTACHED_TIER)
                self.side.settle(WorkerReport(tier_down=proven.NO_UNATTACHED_TIER), self._clock())
        self.side.begin_turn(request, self._clock())

    def rank(self, request: Any, by_priority: bool) -> tuple[Any, ...]:
        """A waiting request's place in the queue; the user's priority first, if in force."""
        assert self.side is not None
        rank = self.side.rank(request, compat.is_preempted(request))
        holds = not compat.holds_kv(request)
        return (holds, request.priority, *rank) if by_priority else (holds, *rank)

    @timed("get_num_new_matched_tokens")
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.acting is None:
            return 0, False
        now = self._clock()
        if not self._is_attached:
            self.acting.unattached.before_lookup(request, num_computed_tokens, now)
        found = self.acting.match(request, num_computed_tokens, now)
        return (0, False) if compat.computes_whole_prompt(request) else found

    def make_room(
        self, request: Any, attempt: Callable[[], Any], need: int, others_run: bool
    ) -> Any:
        """An allocation failed: ask again while pins give way (scheduler subclass only)."""
        assert self.side is not None
        began = time.perf_counter()
        blocks = self.side.make_room(request, attempt, need, others_run, self._clock())
        self.account.observe("hook_seconds", time.perf_counter() - began, "allocate_slots")
        return blocks

    def has_pending_block_frees(self) -> bool:
        if self.side is None:
            return False
        now = self._clock()
        if not self._is_attached and self.side.retention.give_up_cheapest(now):
            return True
        return self.side.will_free_blocks(now)

    @timed("update_state_after_alloc")
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.side is None:
            return
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        if self.acting is not None:
            self.acting.after_alloc(request, block_ids, num_external_tokens, self._clock())
        elif num_external_tokens:  # promised before the switch (vLLM >= 0.33 starts loads late)
            self.side.tier.load("", request, block_ids, num_external_tokens, self._clock())

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Most steps only decode: those cost a look at the clock and one at what is due."""
        side = self.side
        if side is None:
            return NO_ORDERS
        now = self._clock()
        work = compat.step_work(scheduler_output, self._step_clock.skips_decodes)
        self._step_clock.scheduled(work, now)
        if (
            side.is_idle(now)
            and self._is_attached
            and not self._is_switch_due
            and not compat.preempted_ids(scheduler_output)
        ):
            return NO_ORDERS
        return self._plan(side, scheduler_output, now)

    @timed("build_connector_meta")
    def _plan(self, side: SchedulerSide, scheduler_output: Any, now: float) -> StepMetadata:
        self._follow_switch(side, now)
        if not self._is_attached:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            side.unattached.after_step(num_tokens, side.waits_for_room, now)
        for request_id in compat.preempted_ids(scheduler_output):
            side.note_preempted(request_id, now)
        return StepMetadata(side.plan(now))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and self.side is not None and isinstance(meta, WorkerMetadata):
            self._settle(self.side, meta.report)

    @timed("update_connector_output")
    def _settle(self, side: SchedulerSide, report: WorkerReport) -> None:
        side.settle(report, self._clock())
        if self.acting is None:
            self._tell_at = 0.0  # nothing of ours may follow that would show it

    @timed("request_finished")
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the free: our own references keep what we want (vllm-facts Q2)."""
        if self.side is None:
            return False, None
        if self.acting is None:
            self.side.tier.forget_request(request.request_id)
            return False, None
        end = compat.turn_end(request)
        return False, self.acting.finish(request, block_ids, end, self._clock())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """True only while copies are to settle, a pin is due or the switch was turned: anything
        more burns a core."""
        if self.side is None:
            return False
        return self._is_switch_due or self.side.has_work(self._clock())

    @property
    def _is_switch_due(self) -> bool:
        return self.switch.is_on is not (self.acting is not None)

    def _follow_switch(self, side: SchedulerSide, now: float) -> None:
        """Do as the switch says, once a step is put together: no admission is half done then."""
        if not self._is_switch_due:
            return
        is_on = self.acting is None
        self.acting = side if is_on else None
        self.on_switch(is_on)
        side.switch(is_on, now)
        self._tell_at = 0.0
        logger.warning(build.SWITCHED_ON if is_on else build.SWITCHED_OFF)

    def take_events(self) -> Iterable[Any]:
        return self.side.tier.take_events() if self.side is not None else ()

    def reset_cache(self) -> bool:
        if self.side is not None:
            self.side.reset(self._clock())
        return True
