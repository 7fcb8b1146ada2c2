"""Loads: which requests wait for loads, until vLLM has been told of each, once."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_connector.messages import LoadOrder, TransferOutcome

Polled = tuple[set[str], set[str]]


@dataclass
class _Waiting:
    """A request with loads that have not settled, and the blocks of those that failed."""

    num_loads: int = 0
    bad_blocks: set[int] = field(default_factory=set)


class Loads:
    """The loads of one rank. A request that is reported twice kills vLLM, so its last load reports
    it."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, order: LoadOrder) -> None:
        """Its request waits for one more load."""
        self._waiting.setdefault(order.request_id, _Waiting()).num_loads += 1

    def settle(self, order: LoadOrder, outcome: TransferOutcome) -> None:
        """A load has ended."""
        waiting = self._waiting[order.request_id]
        waiting.num_loads -= 1
        if outcome.num_failed:
            waiting.bad_blocks.update(order.blocks.tolist())
        if waiting.num_loads:
            return
        del self._waiting[order.request_id]
        self._finished.add(order.request_id)
        if waiting.bad_blocks:
            self._failed.add(order.request_id)
            self._bad_blocks |= waiting.bad_blocks

    def take(self) -> Polled:
        """The requests whose loads have settled since the last call, and which of them failed."""
        if not self._finished:
            return set(), set()
        polled = (self._finished, self._failed)
        self._finished, self._failed = set(), set()
        return polled

    def take_bad_blocks(self) -> set[int]:
        """The VRAM blocks without loaded data, of requests that failed since the last call."""
        if not self._bad_blocks:
            return set()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad
