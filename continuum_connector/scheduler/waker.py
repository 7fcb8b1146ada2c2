"""Waker: makes an idle engine step when a pin's deadline passes or a hanging copy must be checked
again. Until then it costs no CPU time.

An idle EngineCore blocks in `input_queue.get` and takes no steps (vLLM v1/engine/core.py,
_process_input_queue). One thread sleeps until the earliest deadline and puts a no-op
message there; the expiry itself happens on the scheduler's own thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class Waker:
    """Calls `wake` from its own thread once `set` time has come (time.monotonic seconds). None: the
    engine has no input queue (offline LLM), so what is due waits for its next step."""

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._times: dict[str, float] = {}  # by the part that set them
        self._closed = False
        self._thread: threading.Thread | None = None

    def set(self, at: float, whose: str = "pins") -> None:
        """Wake at `at`, or never if it is infinite; this replaces the time that `whose` set
        before."""
        if self._wake is None or at == self._times.get(whose, math.inf):
            return
        with self._changed:
            earlier = at < self._next
            self._times[whose] = at
            if self._thread is None and at < math.inf:
                self._thread = threading.Thread(
                    target=self._run, name="continuum-waker", daemon=True
                )
                self._thread.start()
            elif earlier:
                self._changed.notify()

    @property
    def _next(self) -> float:
        return min(self._times.values(), default=math.inf)

    def close(self) -> None:
        """Stop the thread; it wakes the engine no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        assert self._wake is not None
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                left = self._next - now
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                    continue
                self._times = {whose: at for whose, at in self._times.items() if at > now}
                self._wake()
