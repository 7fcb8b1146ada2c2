"""ProgramQueue: which turn is admitted next. Stands in for vLLM's waiting queue.
Queues: all of them in one engine. Front: a queue with some of its requests moved to its front.

Preempted turns come first, the others by place (SchedulerSide.rank). A turn's place changes while
it waits, when the pin that it came back for appears or ends. Only that turn is then ranked again,
so every operation is O(log n). Turns held at the gate wait here too, hidden from vLLM, and so do
turns that wait for blocks that come up to DRAM, or to VRAM for another turn, and for an adapter's
place. Turns that wait for the bus are hidden as well, but kept in order.

LazyHeap: the smallest of many items whose keys change while they are in the heap; of pins, too.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Generic, TypeVar

QueueRank = tuple[Any, ...]


class ProgramQueue:
    """A vLLM RequestQueue (v1/core/sched/request_queue.py) ranked by `rank(request)`.

    `pop_request` returns what `peek_request` showed, even if the rank of some request has
    changed between the two: vLLM admits the request it peeked (scheduler.py, schedule()).
    """

    def __init__(
        self,
        rank: Callable[[Any], QueueRank],
        holds: Callable[[Any], bool] | None = None,
        hides: Callable[[Any], bool] | None = None,
        sets_aside: Callable[[Any], bool] | None = None,
        passes_over: Callable[[Any], bool] | None = None,
    ) -> None:
        """All four hide a request until `release`. `holds(request)`: whether a new request must
        wait at the gate. `hides(request)`: whether a request that vLLM puts back is hidden.
        `sets_aside(request)`: whether such a request is hidden, but kept in order.
        `passes_over(request)`: whether the first in line is hidden before vLLM sees it."""
        self._rank = rank
        self._holds = holds
        self._hides = hides
        self._sets_aside = sets_aside
        self._passes_over = passes_over
        self._held: dict[str, Any] = {}
        self._aside: LazyHeap[Any] = LazyHeap()
        self._heap: LazyHeap[Any] = LazyHeap()
        self._by_id: dict[str, Any] = {}
        self._peeked: Any = None
        self._is_open = True

    # --- vLLM's interface -------------------------------------------------------------
    def add_request(self, request: Any) -> None:
        if self._holds is not None and self._holds(request):
            self._held[request.request_id] = request
        else:
            self._admit(request)

    def prepend_request(self, request: Any) -> None:
        """Put a preempted or skipped request back; its rank says where."""
        if self._hides is not None and self._hides(request):
            self._held[request.request_id] = request
        elif self._sets_aside is not None and self._sets_aside(request):
            self._by_id[request.request_id] = request
            self._aside.push(self._rank(request), request)
        else:
            self._admit(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        first = self._heap.first()
        if first is None:
            raise IndexError("peek from an empty queue")
        self._peeked = first[1]
        return self._peeked

    def pop_request(self) -> Any:
        request = self._peeked if self._peeked in self._heap else self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        if self._held.pop(request.request_id, None) is not None:
            return
        del self._by_id[request.request_id]
        self._heap.discard(request)
        self._aside.discard(request)
        self._peeked = None

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in list(requests):
            if request in self:
                self.remove_request(request)

    def __bool__(self) -> bool:
        """Whether some request may be admitted; vLLM peeks only then. So this is where the first in
        line are hidden that must be passed over."""
        if self._passes_over is not None:
            self._hide_passed_over(self._passes_over)
        return bool(self._heap) and self._is_open

    def __len__(self) -> int:
        return len(self._by_id) + len(self._held)  # vLLM asks three times a step

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self._by_id or request.request_id in self._held

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._heap, self._aside, self._held.values())

    # --- ours -------------------------------------------------------------------------
    def peek_rank(self) -> QueueRank:
        """The rank of the request that `peek_request` would show; the queue must not be empty."""
        first = self._heap.first()
        if first is None:
            raise IndexError("rank of an empty queue")
        return first[0]

    def set_open(self, is_open: bool) -> None:
        """Whether vLLM is shown any request in this step."""
        self._is_open = is_open

    def rerank(self, request_id: str) -> None:
        """The request's place has changed: move it, if it is here."""
        request = self._by_id.get(request_id)
        if request is not None:
            heap = self._aside if request in self._aside else self._heap
            heap.push(self._rank(request), request)

    @property
    def first_aside(self) -> tuple[QueueRank, str] | None:
        """The rank and the id of the first request set aside."""
        first = self._aside.first()
        return None if first is None else (first[0], first[1].request_id)

    def release(self, request_id: str) -> None:
        """If the request is held at the gate, hidden or set aside, it may be admitted from now
        on."""
        request = self._held.pop(request_id, None)
        if request is None and (aside := self._by_id.get(request_id)) in self._aside:
            request = aside
            self._aside.discard(request)
        if request is not None:
            self._admit(request)

    def _hide_passed_over(self, passes_over: Callable[[Any], bool]) -> None:
        while (first := self._heap.first()) is not None and passes_over(first[1]):
            self.remove_request(first[1])
            self._held[first[1].request_id] = first[1]

    def _admit(self, request: Any) -> None:
        self._by_id[request.request_id] = request
        self._heap.push(self._rank(request), request)


class Queues:
    """All of our queues in one engine; empty while vLLM's own are in their place."""

    def __init__(self) -> None:
        self._queues: Sequence[ProgramQueue] = ()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def use(self, queues: Sequence[ProgramQueue]) -> None:
        """From now on turns wait in these."""
        self._queues = queues

    def set_open(self, is_open: bool) -> None:
        """Whether vLLM is shown any request in this step."""
        for queue in self._queues:
            queue.set_open(is_open)

    def rerank(self, request_id: str) -> None:
        """The request's place has changed: move it, if it waits."""
        for queue in self._queues:
            queue.rerank(request_id)

    def release(self, request_ids: Iterable[str]) -> None:
        """These may be admitted from now on, if they are held at the gate, hidden or set aside."""
        for request_id in request_ids:
            for queue in self._queues:
                queue.release(request_id)

    def release_first_aside(self) -> str | None:
        """The first of all that are set aside may be admitted from now on; return its id."""
        firsts = [(first, queue) for queue in self._queues if (first := queue.first_aside)]
        if not firsts:
            return None
        (_, request_id), queue = min(firsts, key=lambda each: each[0])
        queue.release(request_id)
        return request_id

    def first(self) -> ProgramQueue | None:
        """The queue whose first request is before those of the others."""
        return min(filter(None, self._queues), key=methodcaller("peek_rank"), default=None)


class Front:
    """`queue` as if the requests `first`, which are in it, stood at its front. It has the part of a
    RequestQueue that vLLM uses of the queue that it admits from."""

    def __init__(self, queue: Any, first: deque[Any]) -> None:
        self._queue = queue
        self._first = first

    def peek_request(self) -> Any:
        return self._first[0]

    def pop_request(self) -> Any:
        request = self._first.popleft()
        self._queue.remove_request(request)
        return request


Item = TypeVar("Item", bound=Hashable)
Key = tuple[Any, ...]  # compared; of equal keys the one pushed first comes first


class LazyHeap(Generic[Item]):
    """`push`, `discard` and `first` take O(log n), and memory stays within twice the items.

    A binary heap can remove only its first item, and move none. Here an item that moves gets a new
    entry, and an item that leaves gets none. Old entries are stale, and skipped when they come up.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._current: dict[Item, int] = {}  # item -> number of its live entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: Item) -> bool:
        return item in self._current

    def __iter__(self) -> Iterator[Item]:
        """The items, the smallest key first."""
        live = filter(self._is_current, self._entries)
        return (item for _, _, item in sorted(live, key=lambda entry: entry[:2]))

    def push(self, key: Key, item: Item) -> None:
        """Insert the item, or move it if it is there."""
        number = next(self._numbers)
        self._current[item] = number
        heapq.heappush(self._entries, (key, number, item))
        if len(self._entries) > 64 + 2 * len(self._current):
            self._entries = list(filter(self._is_current, self._entries))
            heapq.heapify(self._entries)

    def discard(self, item: Item) -> None:
        """Take the item out, if it is there."""
        self._current.pop(item, None)

    def first(self) -> tuple[Key, Item] | None:
        """The smallest key and its item, which stays in the heap; None if the heap is empty."""
        while self._entries:
            key, number, item = self._entries[0]
            if self._current.get(item) == number:
                return key, item
            heapq.heappop(self._entries)
        return None

    def _is_current(self, entry: tuple[Key, int, Item]) -> bool:
        return self._current.get(entry[2]) == entry[1]
