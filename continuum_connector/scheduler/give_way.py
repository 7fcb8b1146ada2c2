"""Room: pins give way inside the very allocation that needs their blocks (law 1).

vLLM's `allocate_slots` answers None when blocks are short. It is asked again without the
cheapest pins until it succeeds; if it would fail even without all of them, every pin is
put back and the answer stays None: then vLLM does what it does without us.

Claim: which pins a turn that finds no room may take (policy.md, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from continuum_connector.scheduler.holds import BlockPool, HoldTable
from continuum_connector.scheduler.pins import Pin, PinTable

T = TypeVar("T")

RETRY_STEPS = 8
MAX_SPARED = 32  # pins that a patient turn looks at and leaves alone, before it gives up


class Room:
    """Makes room for one allocation at a time. `on_release` is told of each pin given up."""

    def __init__(
        self,
        pool: BlockPool,
        pins: PinTable,
        holds: HoldTable,
        on_release: Callable[[Pin], None],
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._holds = holds
        self._on_release = on_release
        self._hopeless: tuple[Any, ...] = ()
        self._num_steps = 0

    def new_step(self) -> None:
        """The engine took a step: what failed may be worth another try."""
        self._num_steps += 1

    def references_dropped(self) -> None:
        """A store or a turn let go of blocks: pins that gained nothing may gain now."""
        self._hopeless = ()

    def make(
        self,
        attempt: Callable[[], T | None],
        request_id: str,
        need: int,
        own: Pin | None,
        claim: Claim,
    ) -> T | None:
        """Retry `attempt` without the cheapest pins that it may take; return its answer.

        `need`: a lower bound of the blocks the allocation takes from the pool, or 0 for a
        running request. `own`: the pin that this very request came back for, which goes
        last: the blocks it shares with the request gain nothing, they would only be counted
        as free instead of found. Costs O(blocks) per pin tried, so what failed for a waiting
        request is not tried again until something changed, RETRY_STEPS at the latest; a patient
        one only then, or when somebody let go of blocks. A running request is preempted if this
        fails, so for it pins are tried every time.
        """
        free = self._pool.get_num_free_blocks()
        if not len(self._pins) or free + self._holds.num_blocks < need:
            return None
        retry = self._num_steps // RETRY_STEPS
        state: tuple[Any, ...] = (request_id, need, retry, claim.is_patient)
        if not claim.is_patient:
            state += (free, len(self._pins), self._holds.num_blocks)
        if need and state == self._hopeless:
            return None
        tried, answer = self._try(attempt, max(need, free + 1), own, claim)
        if answer is None:
            for pin in reversed(tried):
                self._holds.restore(pin.hold)
            self._hopeless = state
            return None
        for pin in tried:
            self._on_release(pin)
        return answer

    def _try(
        self, attempt: Callable[[], T | None], need: int, own: Pin | None, claim: Claim
    ) -> tuple[list[Pin], T | None]:
        tried: list[Pin] = []
        num_spared = 0
        pins = self._pins.cheapest_first()
        try:
            for pin in pins:
                if pin is own:
                    continue
                if not claim.may_take(pin):
                    num_spared += 1
                    if num_spared == MAX_SPARED:
                        break
                    continue
                answer = self._without(pin, tried, attempt, need)
                if answer is not None:
                    return tried, answer
            if own is not None:
                return tried, self._without(own, tried, attempt, 0)
        finally:
            pins.close()
        return tried, None

    def _without(
        self, pin: Pin, tried: list[Pin], attempt: Callable[[], T | None], need: int
    ) -> T | None:
        self._holds.try_without(pin.hold)
        tried.append(pin)
        return attempt() if self._pool.get_num_free_blocks() >= need else None


def _as_made(pin: Pin) -> float:
    return pin.rank[0]


@dataclass(frozen=True)
class Claim:
    """What a turn brings against pins. `arrival`: its program's, monotonic seconds.

    A turn that runs or holds blocks takes any pin, and so does one that has waited for
    `max_wait_s`, and any while nothing computes: the engine always progresses (law 1). A patient
    one, which waits while others compute, leaves those alone whose program came before its own
    and which are worth more by now (`worth_now`) than `price`, what the held block costs a turn
    that waits for it: to break such a pin loses more than it gains. Pins that no policy priced
    have the value 0 and always give way.
    """

    program: str
    arrival: float = -math.inf
    is_patient: bool = False
    price: float = 0.0
    worth_now: Callable[[Pin], float] = _as_made

    def may_take(self, pin: Pin) -> bool:
        value, arrival = pin.rank[0], -pin.rank[1]
        if not self.is_patient or value <= self.price or arrival > self.arrival:
            return True
        return self.worth_now(pin) <= self.price
