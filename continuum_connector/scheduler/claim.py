"""Claim: which pins a turn that finds no room may take (policy.md, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.scheduler.pins import Pin


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
