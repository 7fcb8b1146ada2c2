"""Pressure: a turn found no room. Which pins may it take, and what does that say of the price?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from continuum_connector.scheduler.claim import Claim
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.turn import Turn


class Pressure:
    """`max_wait_s`: how long a waiting turn leaves pins alone that are worth more than its wait."""

    def __init__(self, retention: Retention, decider: Decider, max_wait_s: float) -> None:
        self._retention = retention
        self._decider = decider
        self._max_wait_s = max_wait_s

    def make_room(
        self,
        request_id: str,
        turn: Turn | None,
        attempt: Callable[[], Any],
        need: int,
        others_run: bool,
        now: float,
    ) -> Any:
        """Retry a failed allocation while pins give way; None if that cannot help.

        `need`, `others_run`: as SchedulerSide.make_room has them. While nothing runs no estimate
        is asked: were it too high the engine would stand still for ever (law 1). Room that only
        clients' wishes held has no price, for they give way to everybody.
        """
        need = need if others_run else min(need, 1)
        num_pressed = self._retention.num_pressed
        claim = self._claim(request_id, turn, bool(need) and others_run, now)
        blocks = self._retention.make_room(attempt, request_id, need, claim, now)
        if need and (blocks is None or self._retention.num_pressed > num_pressed):
            self._decider.blocked(now)
        return blocks

    def _claim(self, request_id: str, turn: Turn | None, can_wait: bool, now: float) -> Claim:
        """A turn that was admitted before holds blocks itself, as after a load: it does not wait,
        for others may be waiting for those."""
        if turn is None:
            return Claim(request_id)
        is_early = now - turn.arrival < self._max_wait_s
        return Claim(
            program=turn.program.key,
            arrival=turn.program.arrival,
            is_patient=can_wait and is_early and not turn.is_admitted,
            # This one waits for certain: a second per second, for about so many blocks.
            price=1.0 / self._decider.costs.mean_blocks,
            worth_now=lambda pin: self._decider.worth_now(pin, now),
        )
