"""Adapters: a turn that loads keeps a place for its LoRA adapter.

A step computes with at most `max_loras` adapters, and vLLM passes over a waiting turn whose adapter
would be one too many. It counts the adapters of running turns alone (v1/core/sched/scheduler.py,
schedule()). A turn that loads does not run yet, so turns with other adapters would be admitted
meanwhile. It would then wait with its blocks until none of those is left: for ever, if they keep
coming. So from the beginning of its load its adapter counts as if the turn ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import InUse, Turn, Turns


class Adapters:
    """Which adapters are in use. `max_loras`: how many a step can have, 0 if the server has none.

    While nobody loads, and once the tier is down, as after a load that hangs, vLLM's own count is
    all there is.
    """

    def __init__(self, max_loras: int, tier: Tier, turns: Turns) -> None:
        self.is_on = max_loras > 0
        self._max_loras = max_loras
        self._tier = tier
        self._turns = turns
        self._in_use: Counter[int] = Counter()  # turns by adapter
        self._awaited: Counter[int] = Counter()  # of those, turns that load, or have loaded
        self._passed: dict[str, None] = {}
        self._has_changed = False

    def __iter__(self) -> Iterator[str]:
        """The turns that were passed over and wait."""
        return iter(self._passed)

    def is_due(self) -> bool:
        """Whether there is one."""
        return bool(self._passed)

    def allocated(self, turn: Turn, request: Any, loads: bool) -> None:
        """vLLM has admitted the turn: to load, or to run."""
        if not self.is_on or not request.lora_request:
            return
        self.left(turn)
        turn.set_adapter(InUse(request.lora_request.adapter_id, loads))
        self._count(turn.adapter, 1)

    def left(self, turn: Turn) -> None:
        """The turn neither runs nor loads, nor waits here: it is over, was preempted, or has lost
        what it loaded."""
        if not self.is_on:
            return
        self._passed.pop(turn.request_id, None)
        self._count(turn.adapter, -1)
        turn.set_adapter(None)

    def passes_over(self, request: Any) -> bool:
        """Whether the turn, if it were admitted, would take the place of one that loads. If so, it
        waits until `let_in` yields it."""
        if not (self._awaited and request.lora_request and self._tier.is_up):
            return False
        adapter = request.lora_request.adapter_id
        num_used = len(self._in_use) + (adapter not in self._in_use)
        if adapter in self._awaited or num_used <= self._max_loras:
            return False
        self._passed[request.request_id] = None
        return True

    def let_in(self, everybody: bool = False) -> Iterator[str]:
        """Yield the turns that were passed over, if that may be different now. `everybody`: yield
        all of them, and forget who loads, so that none is passed over again."""
        if self._has_changed or everybody or not self._tier.is_up:
            passed, self._passed = self._passed, {}
            for turn in self._turns.all() if everybody else ():
                self.left(turn)
            self._has_changed = False
            yield from passed

    def _count(self, use: InUse | None, change: int) -> None:
        if use is None:
            return
        adapter = use.adapter
        for counts in (self._in_use, self._awaited) if use.is_awaited else (self._in_use,):
            counts[adapter] += change
            if counts[adapter] == max(change, 0):  # the first turn with it, or the last
                self._has_changed = True
            if not counts[adapter]:
                del counts[adapter]
