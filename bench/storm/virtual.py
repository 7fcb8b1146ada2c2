"""An event loop in virtual time: asyncio's own, that never sleeps.

Where it would wait for a timer or a socket it has the world go on instead, by a step of an engine
or to the next timer. Coroutines do not notice: `sleep`, `wait_for` and cancellation are asyncio's.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from bench.sim.clock import Clock

T = TypeVar("T")

# Seconds until the next timer, infinite if there is none. Moves the clock, by less or by more.
GoOn = Callable[[float], None]


class _NoWaiting(selectors.SelectSelector):
    """Asked to wait, it lets the world go on. Nobody has a socket here."""

    def __init__(self, go_on: GoOn) -> None:
        super().__init__()
        self._go_on = go_on

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._go_on(float("inf") if timeout is None else timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop by `clock`, which `go_on` moves."""

    def __init__(self, clock: Clock, go_on: GoOn) -> None:
        self._clock = clock
        super().__init__(_NoWaiting(go_on))

    def time(self) -> float:
        return self._clock.now


def run(clock: Clock, go_on: GoOn, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. What `go_on` raises ends it."""
    loop = VirtualLoop(clock, go_on)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))
        loop.close()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Those that are left when one has failed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
