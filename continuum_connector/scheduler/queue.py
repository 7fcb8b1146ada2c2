"""ProgramQueue: who is admitted next. Stands in for vLLM's waiting queue.

Order (Continuum, section 4.3): preempted turns first, then turns whose program has a live
pin, then the arrival of the program, then the arrival of the turn. Whether a pin lives
changes while a turn waits, so entries are re-ranked when it does; every operation is
O(log n).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Rank = tuple[Any, ...]


class ProgramQueue:
    """A vLLM RequestQueue (v1/core/sched/request_queue.py) ranked by `rank(request)`.

    `pop_request` returns what `peek_request` showed, even if the rank of some request has
    changed between the two: vLLM admits the request it peeked (scheduler.py, schedule()).
    """

    def __init__(self, rank: Callable[[Any], Rank], program_of: Callable[[Any], str]) -> None:
        self._rank = rank
        self._program_of = program_of
        self._heap: list[tuple[Rank, int, Any]] = []
        self._current: dict[Any, int] = {}  # request -> number of its live entry
        self._program: dict[Any, str] = {}  # as it was when the request was queued
        self._by_program: dict[str, set[Any]] = {}
        self._numbers = itertools.count()
        self._peeked: Any = None

    # --- vLLM's interface -------------------------------------------------------------
    def add_request(self, request: Any) -> None:
        program = self._program_of(request)
        self._program[request] = program
        self._by_program.setdefault(program, set()).add(request)
        self._push(request)

    def prepend_request(self, request: Any) -> None:
        """Put a preempted or skipped request back; its rank says where."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        self._drop_stale()
        if not self._heap:
            raise IndexError("peek from an empty queue")
        self._peeked = self._heap[0][2]
        return self._peeked

    def pop_request(self) -> Any:
        request = self._peeked if self._peeked in self._current else self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        del self._current[request]
        self._peeked = None
        program = self._program.pop(request)
        turns = self._by_program[program]
        turns.discard(request)
        if not turns:
            del self._by_program[program]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in list(requests):
            if request in self._current:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._current)

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, request: Any) -> bool:
        return request in self._current

    def __iter__(self) -> Iterator[Any]:
        live = [entry for entry in self._heap if self._is_current(entry)]
        return (entry[2] for entry in sorted(live, key=lambda entry: entry[:2]))

    # --- ours -------------------------------------------------------------------------
    def peek_rank(self) -> Rank:
        """The rank of whom `peek_request` would show; the queue must not be empty."""
        self._drop_stale()
        return self._heap[0][0]

    def rerank(self, program: str) -> None:
        """The program's pin appeared or ended: move its waiting turns."""
        for request in self._by_program.get(program, ()):
            self._push(request)

    def _push(self, request: Any) -> None:
        number = next(self._numbers)
        self._current[request] = number
        heapq.heappush(self._heap, (self._rank(request), number, request))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _drop_stale(self) -> None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_current(self, entry: tuple[Rank, int, Any]) -> bool:
        return self._current.get(entry[2]) == entry[1]


class Front:
    """`queue` as if `first`, who are in it, stood at its front: as much of a RequestQueue as vLLM
    asks of the one that it admits from."""

    def __init__(self, queue: Any, first: deque[Any]) -> None:
        self._queue = queue
        self._first = first

    def peek_request(self) -> Any:
        return self._first[0]

    def pop_request(self) -> Any:
        request = self._first.popleft()
        self._queue.remove_request(request)
        return request
