"""Attach: a subclass of whichever Scheduler vLLM chose, in which our hooks have their place.

It does six things: names a request's program before it is queued, queues in program order,
lines up preemption victims, retries a failed allocation while pins give way, forgets the
hashes of what a victim never computed, and drops pins before the prefix cache is reset.
Servers without our connector never see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from continuum_connector.allocation import Allocation
    from continuum_connector.order import Order

_MARK = "_continuum_wraps"
_NAMED = "continuum_connector.scheduler_cls"


def install(scheduler_config_class: Any) -> None:
    """Make SchedulerConfig.get_scheduler_cls answer with our subclass where we are configured.

    vLLM v1/engine/core.py calls the answer once, with vllm_config as a keyword. Idempotent.
    """
    original = scheduler_config_class.get_scheduler_cls
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> Any:
        chosen = original(self)
        # A user's own --scheduler-cls is respected.
        return chosen if self.scheduler_cls is not None else functools.partial(_build, chosen)

    setattr(get_scheduler_cls, _MARK, original)
    scheduler_config_class.get_scheduler_cls = get_scheduler_cls


def scheduler_cls(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a class: `--scheduler-cls continuum_connector.scheduler_cls`.

    Derives from the class vLLM would have chosen, so that one name serves sync and async.
    """
    config = _vllm_config(args, kwargs).scheduler_config
    named, config.scheduler_cls = config.scheduler_cls, None
    try:
        original = getattr(type(config).get_scheduler_cls, _MARK, type(config).get_scheduler_cls)
        base = original(config)
    finally:
        config.scheduler_cls = named
    return _build(base, *args, **kwargs)


def _build(base: type, *args: Any, **kwargs: Any) -> Any:
    from continuum_connector import compat
    from continuum_connector.config import load_config

    transfer = _vllm_config(args, kwargs).kv_transfer_config
    if not compat.names_us(transfer):
        return base(*args, **kwargs)
    if not load_config(compat.our_extra_config(transfer)).scheduler:
        return base(*args, **kwargs)
    return subclass(base)(*args, **kwargs)


def _vllm_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def _hook_in(scheduler: Any, ours: Any) -> tuple[Allocation, Order | None]:
    """Put our hooks into a scheduler that has just been built; no Order if that is vLLM's."""
    from continuum_connector import compat
    from continuum_connector.allocation import Allocation
    from continuum_connector.order import Order

    compat.recompute_failed_loads(scheduler)
    if scheduler.connector is ours:  # a partner's loads may need what this would undo
        compat.free_blocks_at_once(scheduler)
    allocation = Allocation(scheduler, ours)
    if not ours.orders:
        return allocation, None
    order = Order(scheduler, ours)
    ours.on_switch = order.switch
    return allocation, order


def _next_queue(scheduler: Any, ours: Any, own: Callable[[], Any]) -> Any:
    """vLLM <= 0.30: which queue is asked next; `own` is its own answer.

    Whoever holds KV goes first, or it could wait for ever behind a turn that needs the blocks
    it holds; in vLLM's own order too, where a priority may rank that turn first, and while we
    are switched off, when loads that were under way still settle.
    """
    if ours.orders and ours.acting is not None:
        queues = [queue for queue in ours.side.retention.queues if queue]
        return min(queues, key=methodcaller("peek_rank"), default=None)
    from continuum_connector.order import kv_first

    return kv_first(scheduler) or own()


@functools.cache
def subclass(base: Any) -> Any:
    """Return `base` with our hooks; one class per base."""
    from continuum_connector import compat
    from continuum_connector.connector import ContinuumConnector

    class ContinuumScheduler(base):  # type: ignore[misc]
        """vLLM's scheduler with pins that yield and turns in program order."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ours = compat.find_ours(self.connector, ContinuumConnector)
            self._continuum = ours if ours is not None and ours.side is not None else None
            if self._continuum is not None:
                self._allocation, self._order = _hook_in(self, ours)
                ours.attached(base.__name__)

        @property
        def _acting(self) -> Any:
            """Our connector, or None without one and while it is switched off."""
            ours = self._continuum
            return None if ours is None or ours.acting is None else ours

        def _select_waiting_queue_for_scheduling(self) -> Any:  # vLLM <= 0.30
            own = super()._select_waiting_queue_for_scheduling
            if self._continuum is None:
                return own()
            self._allocation.before_admission()
            return _next_queue(self, self._continuum, own)

        def _handle_blocked_waiting_request(self, request: Any) -> Any:
            if self._continuum is not None:
                self._allocation.before_admission()
            return super()._handle_blocked_waiting_request(request)

        def add_request(self, request: Any) -> None:
            if self._acting is not None and request.request_id not in self.requests:
                self._acting.before_queued(request)
            super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._continuum is not None:
                self.kv_holders = None
                if self._allocation.before_step() and self._order is not None:
                    self._order.line_up(self._allocation.num_short())
            return super().schedule(*args, **kwargs)

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            if self._continuum is not None:
                compat.forget_uncomputed(self, request)
            super()._preempt_request(request, *args, **kwargs)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            if self._continuum is not None:
                self._continuum.reset_cache()
            return bool(super().reset_prefix_cache(*args, **kwargs))

    ContinuumScheduler.__name__ = ContinuumScheduler.__qualname__ = f"Continuum{base.__name__}"
    return ContinuumScheduler
