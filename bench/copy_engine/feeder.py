"""Feeder: keeps one direction of an engine copying meanwhile. Meter: how fast it does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from bench.copy_engine.rig import BenchError, Rig, checked
from continuum_connector.worker.abi import Direction

OUTSTANDING = 3  # transfers: the lane never finds its queue empty
LOOK_S = 0.0005


class Feeder:
    """Submits from a thread of its own, which sleeps in the library most of the time."""

    def __init__(self, rig: Rig, direction: Direction, first: int, count: int) -> None:
        share = count // OUTSTANDING
        self._rig, self._direction, self._share = rig, direction, share
        self._firsts = [first + i * share for i in range(OUTSTANDING)]
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
                if not self._stop.is_set():
                    queued.append((self._submit(first), first))
        except Exception as error:
            self._error = error

    def _submit(self, first: int) -> int:
        return self._rig.submit(self._direction, first, self._share)


class Meter:
    """Bytes that the engine copied, by its own count: not in whole transfers."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.restart()

    def restart(self) -> None:
        """What is counted begins now."""
        self._began = self.num_bytes(), time.perf_counter()

    def num_bytes(self) -> int:
        """Since the engine was opened, both directions."""
        return sum(self._rig.engine.stats().num_bytes)

    def rate(self) -> float:
        """GB/s since the start."""
        num_bytes, at_s = self._began
        return (self.num_bytes() - num_bytes) / (time.perf_counter() - at_s) / 1e9


@contextlib.contextmanager
def fed(rig: Rig, directions: Sequence[Direction]) -> Iterator[Meter]:
    """Copies in these directions all the while, metered once they flow, and checked."""
    share = rig.num_blocks // max(1, len(directions))
    feeders = [Feeder(rig, way, i * share, share) for i, way in enumerate(directions)]
    meter = Meter(rig)
    for feeder in feeders:
        feeder.start()
    try:
        while meter.rate() == 0 and any(feeder.is_alive() for feeder in feeders):
            time.sleep(LOOK_S)
        meter.restart()
        yield meter
    finally:
        for feeder in feeders:
            feeder.stop()
        for completion in rig.engine.poll_timed():
            checked(completion)
