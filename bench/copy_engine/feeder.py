"""Feeder: keeps one direction of an engine copying while something else is measured."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from bench.copy_engine.rig import BenchError, Rig, checked
from continuum_connector.worker.engine import Direction

OUTSTANDING = 3  # transfers: the lane never finds its queue empty


class Feeder:
    """Submits from a thread of its own, which sleeps in the library most of the time."""

    def __init__(self, rig: Rig, direction: Direction, first: int, count: int) -> None:
        share = count // OUTSTANDING
        self._rig, self._direction, self._share = rig, direction, share
        self._firsts = [first + i * share for i in range(OUTSTANDING)]
        self._num_done = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._began = (0, 0.0)

    def start(self) -> None:
        self._thread.start()

    def restart_clock(self) -> None:
        """What is counted begins now."""
        self._began = (self._num_done, time.perf_counter())

    def rate(self) -> float:
        """GB/s since the clock was restarted."""
        num_done, at_s = self._began
        num_bytes = (self._num_done - num_done) * self._share * self._rig.block_bytes
        return num_bytes / (time.perf_counter() - at_s) / 1e9

    def stop(self) -> None:
        """Let what is queued finish; raises what went wrong in the thread."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"the background load ended early: {self._error}") from self._error

    def _run(self) -> None:
        try:
            queued = deque((self._submit(first), first) for first in self._firsts)
            while queued:
                tag, first = queued.popleft()
                self._rig.wait(tag)
                self._num_done += 1
                if not self._stop.is_set():
                    queued.append((self._submit(first), first))
        except Exception as error:
            self._error = error

    def _submit(self, first: int) -> int:
        return self._rig.submit(self._direction, first, self._share)


@contextlib.contextmanager
def fed(rig: Rig, directions: Sequence[Direction]) -> Iterator[list[Feeder]]:
    """Copies in these directions all the while, clocks restarted; their outcome is checked."""
    share = rig.num_blocks // max(1, len(directions))
    feeders = [Feeder(rig, way, i * share, share) for i, way in enumerate(directions)]
    for feeder in feeders:
        feeder.start()
    try:
        for feeder in feeders:
            feeder.restart_clock()
        yield feeders
    finally:
        for feeder in feeders:
            feeder.stop()
        for completion in rig.engine.poll_timed():
            checked(completion)
