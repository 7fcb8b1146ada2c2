"""Threads of a measurement: one that copies in Python, and one that competes for the GIL."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from continuum_connector.messages import BlockIds


@dataclass
class Handed:
    """One batch of block copies, and when what happened to it (CLOCK_MONOTONIC)."""

    blocks: BlockIds
    slots: BlockIds
    handed_ns: int = 0
    issued_ns: int = 0
    done_ns: int = 0


class CopyThread:
    """A Python thread that takes batches from a queue, as connectors without an engine do."""

    def __init__(self, copy: Callable[[Handed], None]) -> None:
        self._copy = copy
        self._queue: queue.SimpleQueue[Handed | None] = queue.SimpleQueue()
        self.done: list[Handed] = []
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def hand_over(self, batch: Handed) -> None:
        batch.handed_ns = time.monotonic_ns()
        self._queue.put(batch)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._copy(batch)
            batch.done_ns = time.monotonic_ns()
            self.done.append(batch)


def burn(seconds: float) -> None:
    """Pure Python for a while: it holds the GIL and gives it up only when asked to."""
    end = time.perf_counter() + seconds
    total = 0
    while time.perf_counter() < end:
        for i in range(100):
            total += i


@contextlib.contextmanager
def competing_thread(is_wanted: bool) -> Iterator[None]:
    """A Python thread that computes all the while."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            burn(0.005)

    thread = threading.Thread(target=run, name="competitor", daemon=True)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_wanted:
            thread.join()


def in_a_thread(work: Callable[[], int]) -> tuple[int, float]:
    """Run `work` in a thread of its own: what it returned, and its seconds from begin to end."""
    result: list[tuple[int, float]] = []

    def run() -> None:
        began = time.perf_counter()
        value = work()
        result.append((value, time.perf_counter() - began))

    thread = threading.Thread(target=run, name="copies")
    thread.start()
    thread.join()
    return result[0]
