"""Allocation: vLLM's allocate_slots with pins that give way, in place only where it may fail.

vLLM calls the function for every running request in every step, so one more Python call there
costs more than all our other hooks. Before each step we therefore decide whether an allocation of
a running request can fail at all. If none can, vLLM's own function stays in place until a waiting
turn is to be admitted, because a whole prompt needs room.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from continuum_connector import build
from continuum_connector.vllm import compat


class Allocation:
    """KVCacheManager.allocate_slots of one scheduler, vLLM's own or ours."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        side = ours.side
        self._pins, groups = side.retention.holds, side.groups
        self._own = self._manager.allocate_slots
        self._rule = groups.rule
        self._with_room = _with_room(self._own, scheduler, ours, groups.rule)
        self._ours = ours
        self._num_blocks = groups.num_blocks
        self._lookahead = scheduler.num_lookahead_tokens
        # The most blocks that a step takes, and that each running turn takes beside its share.
        self._most_per_step = groups.num_blocks(scheduler.max_num_scheduled_tokens)
        self._most_per_turn = groups.most_new + groups.num_blocks(self._lookahead)
        self._hears_of_admission = compat.tells_of_admission(scheduler)
        # vLLM's own is a method of the class, unless somebody else has already replaced it.
        self._is_method = getattr(self._own, "__func__", None) is type(self._manager).allocate_slots
        self._manager.allocate_slots = self._with_room
        self._is_ours = True

    def before_step(self) -> bool:
        """Put in place the function that the coming step needs. Returns whether a running request
        may find no block in that step even if every pin gives way, so that a turn is preempted."""
        if not self._ours.is_on:
            self._put_in_place(False)
            return False
        num_running, free = len(self._scheduler.running), self._pool.get_num_free_blocks()
        most = self._most_per_step + num_running * self._most_per_turn
        self._put_in_place(free < most or not self._hears_of_admission)
        # The spare blocks of running turns are counted only where they may matter.
        return bool(free + self._pins.num_blocks < most and free + self._num_giving_way < most)

    def before_admission(self) -> None:
        """The step has served all running turns; vLLM looks at a waiting one next."""
        if not self._is_ours:
            self._put_in_place(self._ours.is_on)

    def num_short(self) -> int:
        """How many blocks running requests will lack in the coming step, counted for each."""
        room = self._pool.get_num_free_blocks() + self._num_giving_way
        return max(0, self._wanted(self._scheduler.running) - int(room))

    @property
    def _num_giving_way(self) -> int:
        """How many blocks that we hold, or make running turns keep, go before any is preempted."""
        return int(
            self._pins.num_blocks + (self._rule.count_spare() if self._rule is not None else 0)
        )

    def _put_in_place(self, is_ours: bool) -> None:
        if is_ours is self._is_ours:
            return
        self._is_ours = is_ours
        if is_ours:
            self._manager.allocate_slots = self._with_room
        elif self._is_method:  # an attribute of the instance makes every call slower
            del self._manager.allocate_slots
        else:
            self._manager.allocate_slots = self._own

    def _wanted(self, running: Sequence[Any]) -> int:
        """How many blocks the running requests will ask for (v1/core/sched/scheduler.py,
        schedule()). Prompts share the step's tokens, each cut to the threshold. Every request that
        decodes is counted, although prompts before it may use up the tokens."""
        num_blocks, budget = 0, self._scheduler.max_num_scheduled_tokens
        longest = compat.longest_chunk(self._scheduler) or budget
        for request in running:
            computed = request.num_computed_tokens
            new = request.num_tokens_with_spec + request.num_output_placeholders - computed
            if request.is_prefill_chunk:
                new = min(new, longest, budget)
                budget -= new
            num_blocks += self._num_blocks(computed + new + self._lookahead)
            num_blocks -= self._num_blocks(computed)
        return num_blocks


def _with_room(
    allocate: Callable[..., Any], scheduler: Any, ours: Any, rule: Any
) -> Callable[..., Any]:
    """Wrap KVCacheManager.allocate_slots so that pins give way before it returns None. For a
    running turn, the spare blocks of running turns give way before the pins do."""
    bind = _bound_arguments(allocate)
    if rule is not None:
        rule.give_way()

    def retry(request: Any, args: Any, kwargs: Any) -> Any:
        attempt = functools.partial(allocate, request, *args, **kwargs)
        need, blocks = 0, None  # a running request needs a block or so, and is preempted without it
        if compat.is_waiting(request):
            call = bind(request, *args, **kwargs)
            if rule is not None and rule.waits_for_step(call.get("new_computed_blocks")):
                return None
            need = build.blocks_needed(call, ours.side)
        elif rule is not None:
            # Admitting a turn is not worth these few blocks, without which a context is not found.
            blocks = _without_spare(rule, attempt, scheduler)
        if blocks is not None:
            return blocks
        return ours.make_room(request, attempt, need, bool(scheduler.running))

    @functools.wraps(allocate)
    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        return retry(request, args, kwargs) if blocks is None else blocks

    return allocate_slots


def _without_spare(rule: Any, attempt: Callable[[], Any], scheduler: Any) -> Any:
    """Retry while running turns give up, one by one, what only their next turns would read."""
    blocks = None
    while blocks is None and rule.give_up_spare(scheduler.requests):
        blocks = attempt()
    return blocks


def _bound_arguments(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that names the arguments of a call to `function`, defaults included."""
    signature = inspect.signature(function)

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    return bind
