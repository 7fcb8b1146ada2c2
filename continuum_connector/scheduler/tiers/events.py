"""TierEvents: vLLM KV events (BlockStored, BlockRemoved, medium "CPU") for DRAM blocks.

Routers learn from them which replica has a program's KV. An event leaves only when the
block is really there: after its store settled.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

from continuum_connector.scheduler.kv_groups import ChainBlocks, Key


class EventFactory(Protocol):
    """Builds vLLM's event objects (kv_events.KvEventFactory)."""

    def stored(
        self, request: Any, indexes: Sequence[int], keys: Sequence[Key], block_size: int
    ) -> list[Any]: ...
    def removed(self, key: Key) -> Any: ...
    def cleared(self) -> Any: ...


class TierEvents:
    """Collects events between two calls of vLLM's `take_events`."""

    def __init__(self, factory: EventFactory, block_size: int) -> None:
        self._factory = factory
        self._block_size = block_size
        self._pending: dict[int, list[tuple[Key, Any]]] = {}
        self._visible: set[Key] = set()  # announced as stored and not yet as removed
        self._out: list[Any] = []

    def describe(self, transfer_id: int, request: Any, blocks: ChainBlocks) -> None:
        """Prepare the events of a store while its request still has its tokens."""
        keys = blocks.keys
        events = self._factory.stored(request, blocks.indexes, keys, self._block_size)
        self._pending[transfer_id] = list(zip(keys, events, strict=True))

    def stored(self, transfer_id: int, kept: Container[Key]) -> None:
        """The store settled; `kept`: those of its blocks that can be found now."""
        for key, event in self._pending.pop(transfer_id, ()):
            if key in kept:
                self._visible.add(key)
                self._out.append(event)

    def cleared(self) -> None:
        """Everything in DRAM was forgotten at once."""
        self._out = [self._factory.cleared()]
        self._visible.clear()

    def removed(self, keys: Iterable[Key]) -> None:
        """These left DRAM, or their store failed; only what was announced is taken back."""
        for key in keys:
            if key in self._visible:
                self._visible.discard(key)
                self._out.append(self._factory.removed(key))

    def take(self) -> list[Any]:
        """Return the events since the last take, in the order in which things happened."""
        out, self._out = self._out, []
        return out
