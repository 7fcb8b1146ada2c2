"""ProgramQueue: who is admitted next. Stands in for vLLM's waiting queue.

Preempted turns first, then by place (SchedulerSide.rank). A turn's place changes while it
waits, when the pin that it stands by appears or ends: then that one turn is ranked anew, so
that every operation is O(log n).
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

    def __init__(self, rank: Callable[[Any], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Any]] = []
        self._current: dict[Any, int] = {}  # request -> number of its live entry
        self._by_id: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._peeked: Any = None

    # --- vLLM's interface -------------------------------------------------------------
    def add_request(self, request: Any) -> None:
        self._by_id[request.request_id] = request
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
        del self._by_id[request.request_id]
        self._peeked = None

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

    def rerank(self, request_id: str) -> None:
        """The request's place has changed: move it, if it is here."""
        request = self._by_id.get(request_id)
        if request is not None:
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
