"""Pressure: a turn found no room. Which pins may it take, and what does that say of the price?

Unattached: pins give way through the connector API alone, where the scheduler is not ours.

With `scheduler = 0` or a user's own --scheduler-cls we never see an allocation fail. So room
is made before it is asked for, from an estimate, and what the estimate gets wrong is put
right afterwards: the engine must always progress (law 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.give_way import Claim
from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.turns import Turn


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


# With async scheduling a step or two are empty while the last tokens are in flight.
NUM_EMPTY_STEPS = 8


class Unattached:
    """`give_up(now)` ends the pin that gives way first; False if there is none. `blocked(now)` is
    told that a waiting turn was refused."""

    def __init__(
        self,
        pool: BlockPool,
        groups: KvGroups,
        give_up: Callable[[float], bool],
        blocked: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._give_up = give_up
        self._blocked = blocked
        self._asked = ""
        self._num_empty = 0

    def before_lookup(self, request: Any, num_vram_tokens: int, now: float) -> None:
        """A waiting turn is about to be allocated: free what its prompt needs at least.

        If it asks again it was refused, so what there was did not do: one more pin goes.
        """
        need = self._groups.num_full_blocks(request.num_tokens)
        need -= self._groups.num_full_blocks(num_vram_tokens)
        if self._asked == request.request_id:
            need = max(need, self._pool.get_num_free_blocks() + 1)
            self._blocked(now)
        self._asked = request.request_id
        while self._pool.get_num_free_blocks() < need and self._give_up(now):
            pass

    def after_step(self, num_tokens: int, is_waiting: bool, now: float) -> None:
        """Steps that compute nothing while turns are there: pins stand in somebody's way."""
        self._num_empty = self._num_empty + 1 if is_waiting and not num_tokens else 0
        if self._num_empty >= NUM_EMPTY_STEPS:
            self._give_up(now)
