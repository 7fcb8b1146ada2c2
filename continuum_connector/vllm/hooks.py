"""Hooks: what one scheduler of vLLM's has of ours, for the subclass in attach.py to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from continuum_connector.vllm import compat, probe
from continuum_connector.vllm.allocation import Allocation
from continuum_connector.vllm.order import KvFirst, Order, end_lost_loads
from continuum_connector.vllm.resets import Resets
from continuum_connector.vllm.touched import Part


class Hooks:
    """The parts of ours in one scheduler. `order` is None if vLLM's own order stays."""

    def __init__(self, scheduler: Any, ours: Any) -> None:
        """Put our parts into a scheduler that has just been built; `ours`: our connector in it."""
        compat.look_up_as_without_connector(scheduler)
        if scheduler.connector is ours:  # loads of another connector may need what this would undo
            compat.free_blocks_at_once(scheduler)
        self._scheduler = scheduler
        self._ours = ours
        side = ours.side
        self._queues = side.queues
        self.order = Order(scheduler, ours) if side.orders else None
        self.allocation = Allocation(scheduler, ours)
        self.resets = Resets(scheduler, ours)
        self._kv_first = KvFirst(scheduler)
        # Of a vLLM that lacks what these need, no turn loads, and no user's priority ranks turns.
        self._may_load = not probe.is_off(Part.TIER)
        self._may_forget = not probe.is_off(Part.PRIORITY)

    @property
    def acting(self) -> Any:
        """Our connector; None while it is switched off."""
        return self._ours if self._ours.is_on else None

    def end_program(self, said: Mapping[str, Any]) -> bool:
        """An operator says that a program is over; False if we do not know it."""
        ours = self.acting
        return ours is not None and bool(ours.end_program(str(said.get("end_program"))))

    def before_step(self) -> None:
        """Do what must be done before vLLM looks at any turn of the coming step."""
        self.resets.before_step()
        if self._may_load and (lost := compat.lost_loads(self._scheduler)):
            ours = self.acting
            before_queued = ours.before_queued if ours is not None else None
            end_lost_loads(self._scheduler, lost, before_queued)
        self._kv_first.new_step()
        must_line_up = self.allocation.before_step()
        if self.order is not None:
            self.order.open()
            if must_line_up:
                self.order.line_up(self.allocation.num_short())

    def before_preemption(self, request: Any) -> None:
        if self._may_forget:
            compat.forget_uncomputed(self._scheduler, request)

    def after_step(self) -> None:
        if self.order is not None:
            self.order.close()

    def next_queue(self, own: Callable[[], Any]) -> Any:
        """vLLM <= 0.30: return the queue that is asked next; `own` is vLLM's own answer.

        A turn that holds KV goes first, or it could wait for ever behind a turn that needs the
        blocks it holds. This is so in vLLM's own order, too, where a priority may rank that other
        turn first, and while we are switched off, because loads that were under way still settle.
        """
        self.allocation.before_admission()
        order = self.order
        if order is not None and order.is_on:
            return self._queues.first()
        return self._kv_first.front() or own()


STOPPED = getattr(RequestStatus, "FINISHED_STOPPED", None)


def ends_session(known: Any, request: Any) -> bool:
    """Whether the request only says that the streaming session `known` gets no more input, and that
    has been answered.

    vLLM then ends the session as it does one whose client went away (Scheduler.add_request).
    """
    idle = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)
    if known is None or idle is None or STOPPED is None:
        return False
    return known.status == idle and not getattr(request, "resumable", True)
