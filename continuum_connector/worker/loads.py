"""Loads: the requests that wait for loads, until vLLM is told of them once."""

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
    """Of one rank. vLLM dies of a request that is reported twice: its last load reports it."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, order: LoadOrder) -> None:
        """One more that its request waits for."""
        self._waiting.setdefault(order.request_id, _Waiting()).num_loads += 1

    def settle(self, order: LoadOrder, outcome: TransferOutcome) -> None:
        """One has ended."""
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
        """The requests whose loads settled, those of them that failed, since last."""
        if not self._finished:
            return set(), set()
        polled = (self._finished, self._failed)
        self._finished, self._failed = set(), set()
        return polled

    def take_bad_blocks(self) -> set[int]:
        """The VRAM blocks that hold no loaded data, of requests that failed since last."""
        if not self._bad_blocks:
            return set()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad
