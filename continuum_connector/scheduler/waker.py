"""Waker: steps an idle engine when a pin's deadline passes, at no CPU cost until then.

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
    """Calls `wake` from its own thread once `set` time has come (time.monotonic seconds)."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._at = math.inf
        self._closed = False
        self._thread: threading.Thread | None = None

    def set(self, at: float) -> None:
        """Wake at `at`, or never if infinite; replaces the time set before."""
        if at == self._at:
            return
        with self._changed:
            earlier = at < self._at
            self._at = at
            if self._thread is None and at < math.inf:
                self._thread = threading.Thread(
                    target=self._run, name="continuum-waker", daemon=True
                )
                self._thread.start()
            elif earlier:
                self._changed.notify()

    def close(self) -> None:
        """Stop the thread; nothing is woken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._at - time.monotonic()
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                    continue
                self._at = math.inf
                self._wake()


class NoWaker:
    """For engines without an input queue (offline LLM): pins expire at the next step."""

    def set(self, at: float) -> None:
        """Do nothing: deadlines are checked whenever the engine steps."""

    def close(self) -> None:
        """Do nothing."""
