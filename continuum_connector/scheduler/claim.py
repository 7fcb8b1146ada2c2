"""Claim: which pins a turn that finds no room may take (policy.md, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_connector.scheduler.pins import Pin


@dataclass(frozen=True)
class Claim:
    """What a turn brings against pins. `arrival`: its program's, monotonic seconds.

    A turn that runs or holds blocks takes any pin, and so does one that has waited for
    `max_wait_s`, and any while nothing computes: the engine always progresses (law 1). A patient
    one, which waits while others compute, leaves those alone whose program came before its own
    and whose `value` is above `price`, the seconds that a held block costs the waiting per
    second: to break such a pin loses more than it gains. Pins that no policy priced have the
    value 0 and always give way.
    """

    program: str
    arrival: float = -math.inf
    is_patient: bool = False
    price: float = 0.0

    def may_take(self, pin: Pin) -> bool:
        value, arrival = pin.rank[0], -pin.rank[1]
        return not self.is_patient or value <= self.price or arrival > self.arrival
