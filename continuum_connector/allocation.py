"""Allocation: vLLM's allocate_slots with pins that give way, in place only where it may fail.

vLLM calls it for every running request in every step, so one more Python call there costs more
than all our other hooks. Before each step it is therefore decided whether any allocation of
the step can fail at all; if none can, the function is vLLM's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from continuum_connector import build


class Allocation:
    """KVCacheManager.allocate_slots of one scheduler, vLLM's own or ours."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._own = self._manager.allocate_slots
        self._with_room = _with_room(self._own, scheduler, ours)
        size, num_groups = ours.side.groups.block_size, len(ours.side.groups)
        lookahead = -(-scheduler.num_lookahead_tokens // size)
        self._per_request = num_groups * (1 + lookahead)
        self._per_step = num_groups * -(-scheduler.max_num_scheduled_tokens // size)
        self._manager.allocate_slots = self._with_room

    def before_step(self) -> bool:
        """Put the function in place that the coming step needs. Returns whether a running
        request may find no block in it: n new tokens take n / block_size blocks, rounded up."""
        num_running = len(self._scheduler.running)
        need = num_running * self._per_request + self._per_step
        is_tight = bool(self._pool.get_num_free_blocks() < need)
        self._manager.allocate_slots = (
            self._with_room if is_tight or self._may_admit(num_running) else self._own
        )
        return is_tight

    def _may_admit(self, num_running: int) -> bool:
        """Whether somebody waits, and vLLM may run one more: whole prompts want room then."""
        is_full = num_running >= self._scheduler.max_num_running_reqs
        return not is_full and len(self._scheduler.requests) > num_running


def _with_room(allocate: Callable[..., Any], scheduler: Any, ours: Any) -> Callable[..., Any]:
    """Wrap KVCacheManager.allocate_slots: before it answers None, pins give way."""
    from continuum_connector import compat

    bind = _bound_arguments(allocate)

    def retry(request: Any, args: Any, kwargs: Any) -> Any:
        need = 0  # a running request needs a block or so, and is preempted if it gets none
        if compat.is_waiting(request):
            need = build.blocks_needed(bind(request, *args, **kwargs), ours.side)
        attempt = functools.partial(allocate, request, *args, **kwargs)
        return ours.make_room(request, attempt, need, bool(scheduler.running))

    @functools.wraps(allocate)
    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None or ours.acting is None:
            return blocks
        return retry(request, args, kwargs)

    return allocate_slots


def _bound_arguments(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that names the arguments of a call to `function`, defaults included."""
    signature = inspect.signature(function)

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    return bind
