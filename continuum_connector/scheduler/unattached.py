"""Unattached: pins give way through the connector API alone, where the scheduler is not ours.

With `scheduler = 0` or a user's own --scheduler-cls we never see an allocation fail. So room
is made before it is asked for, from an estimate, and what the estimate gets wrong is put
right afterwards: the engine must always progress (law 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from continuum_connector.scheduler.holds import BlockPool
from continuum_connector.scheduler.kv_groups import KvGroups

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
        size = self._groups.block_size
        need = -(-request.num_tokens // size) - num_vram_tokens // size
        need *= self._groups.num_full
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
