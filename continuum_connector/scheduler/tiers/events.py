"""TierEvents: vLLM KV events (BlockStored, BlockRemoved, medium "CPU") for DRAM blocks.

Routers learn from them which replica has a program's KV. An event is published only once the block
is really there: after its store has settled.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

from continuum_connector.scheduler.kv_groups import Key, KvGroups

Span = tuple[int, int]  # tokens of a chain: the first, and the one after the last


class EventFactory(Protocol):
    """Builds vLLM's event objects (compat.KvEventFactory)."""

    def stored(
        self, request: Any, spans: Sequence[Span], keys: Sequence[Key], hash_size: int
    ) -> list[Any]: ...
    def removed(self, key: Key) -> Any: ...
    def kept_below(self, keys: Sequence[Key], block_size: int) -> list[Any]: ...
    def left_below(self, keys: Sequence[Key]) -> list[Any]: ...


class TierEvents:
    """Collects events between two calls of vLLM's `take_events`."""

    def __init__(self, factory: EventFactory, groups: KvGroups) -> None:
        self._factory = factory
        self._groups = groups
        self._pending: dict[int, list[tuple[Key, Any]]] = {}
        self._visible: set[Key] = set()  # announced as stored and not yet as removed
        self._out: list[Any] = []

    def describe(
        self, transfer_id: int, request: Any, keys: Sequence[Key], ends: Sequence[int]
    ) -> None:
        """Prepare the events of a store, or of a read from below, while its request still has its
        tokens; `ends`: where in the chain each block ends."""
        spans = [
            (self._groups.start_of(key, end), end) for key, end in zip(keys, ends, strict=True)
        ]
        events = self._factory.stored(request, spans, keys, self._groups.hash_size)
        self._pending[transfer_id] = list(zip(keys, events, strict=True))

    def stored(self, transfer_id: int, kept: Container[Key]) -> None:
        """The store settled; `kept`: those of its blocks that can be found now."""
        for key, event in self._pending.pop(transfer_id, ()):
            if key in kept:
                self._visible.add(key)
                self._out.append(event)

    def lost(self) -> None:
        """All of DRAM was forgotten, and nothing else."""
        self.removed(list(self._visible))

    def removed(self, keys: Iterable[Key]) -> None:
        """These left DRAM, or their store failed; only those announced before are withdrawn."""
        for key in keys:
            if key in self._visible:
                self._visible.discard(key)
                self._out.append(self._factory.removed(key))

    def kept_below(self, keys: Sequence[Key]) -> None:
        """These are kept below DRAM. Blocks that were written with them, under the same name, are
        not announced: once only the name is left, nothing tells which blocks those were."""
        self._out += self._factory.kept_below(keys, self._groups.hash_size)

    def left_below(self, keys: Sequence[Key]) -> None:
        """These are kept there no more."""
        self._out += self._factory.left_below(keys)

    def take(self) -> list[Any]:
        """Return the events since the last take, in the order in which things happened."""
        out, self._out = self._out, []
        return out
