"""Announced is what is there, in the order in which it came and went."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from continuum_connector.scheduler.kv_groups import ChainBlocks, Key
from continuum_connector.scheduler.tiers.events import TierEvents


class FakeFactory:
    """Events as tuples."""

    def stored(
        self, request: Any, indexes: Sequence[int], keys: Sequence[Key], block_size: int
    ) -> list[Any]:
        pairs = zip(indexes, keys, strict=True)
        return [("stored", key, request, index, block_size) for index, key in pairs]

    def removed(self, key: Key) -> Any:
        return ("removed", key)

    def cleared(self) -> Any:
        return ("cleared",)


def stored(events: TierEvents, transfer_id: int, *names: bytes, kept: set[bytes]) -> None:
    blocks = tuple(SimpleNamespace(block_hash=name) for name in names)
    events.describe(transfer_id, "request", ChainBlocks(blocks, range(len(names))))
    events.stored(transfer_id, kept)


def short(events: TierEvents) -> list[tuple[Any, ...]]:
    return [event[:2] for event in events.take()]


def test_a_block_is_announced_when_its_store_settles_and_only_once() -> None:
    events = TierEvents(FakeFactory(), 16)
    block = SimpleNamespace(block_hash=b"a")
    events.describe(1, "request", ChainBlocks((block,), [3]))
    assert events.take() == []
    events.stored(1, {b"a"})
    assert events.take() == [("stored", b"a", "request", 3, 16)]
    assert events.take() == []


def test_what_the_store_did_not_keep_is_never_mentioned() -> None:
    events = TierEvents(FakeFactory(), 16)
    stored(events, 1, b"a", b"b", kept={b"b"})
    events.removed([b"a"])
    assert short(events) == [("stored", b"b")]
    events.stored(2, {b"c"})  # nobody described it
    assert events.take() == []


def test_a_block_that_left_and_came_back_is_there_in_the_end() -> None:
    events = TierEvents(FakeFactory(), 16)
    stored(events, 1, b"a", kept={b"a"})
    events.removed([b"a"])
    events.removed([b"a"])
    stored(events, 2, b"a", kept={b"a"})
    assert short(events) == [("stored", b"a"), ("removed", b"a"), ("stored", b"a")]


def test_after_a_clear_nothing_older_is_mentioned() -> None:
    events = TierEvents(FakeFactory(), 16)
    stored(events, 1, b"a", kept={b"a"})
    events.cleared()
    events.removed([b"a"])
    stored(events, 2, b"b", kept={b"b"})
    assert short(events) == [("cleared",), ("stored", b"b")]
