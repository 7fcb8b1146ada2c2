"""Announced is what is there, in the order in which it came and went."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from continuum_connector.scheduler.kv_groups import (
    STATE,
    Key,
    KvGroup,
    KvGroups,
    block_key,
)
from continuum_connector.scheduler.tiers.base import TierEvents

GROUPS = KvGroups([KvGroup(0, 16)], 16)
A, B, C = (block_key(name, 0) for name in (b"a", b"b", b"c"))


class FakeFactory:
    """Events as tuples."""

    def stored(
        self, request: Any, spans: Sequence[tuple[int, int]], keys: Sequence[Key], hash_size: int
    ) -> list[Any]:
        pairs = zip(spans, keys, strict=True)
        return [("stored", key, request, span, hash_size) for span, key in pairs]

    def removed(self, key: Key) -> Any:
        return ("removed", key)


def stored(events: TierEvents, transfer_id: int, *names: bytes, kept: set[bytes]) -> None:
    blocks = tuple(SimpleNamespace(block_hash=name) for name in names)
    keys, ends = [block.block_hash for block in blocks], range(16, 16 * len(names) + 1, 16)
    events.describe(transfer_id, "request", keys, ends)
    events.stored(transfer_id, kept)


def short(events: TierEvents) -> list[tuple[Any, ...]]:
    return [event[:2] for event in events.take()]


def test_a_block_is_announced_when_its_store_settles_and_only_once() -> None:
    events = TierEvents(FakeFactory(), GROUPS)
    block = SimpleNamespace(block_hash=A)
    events.describe(1, "request", [block.block_hash], [64])
    assert events.take() == []
    events.stored(1, {A})
    assert events.take() == [("stored", A, "request", (48, 64), 16)]
    assert events.take() == []


def test_what_the_store_did_not_keep_is_never_mentioned() -> None:
    events = TierEvents(FakeFactory(), GROUPS)
    stored(events, 1, A, B, kept={B})
    events.removed([A])
    assert short(events) == [("stored", B)]
    events.stored(2, {C})  # nobody described it
    assert events.take() == []


def test_a_block_that_left_and_came_back_is_there_in_the_end() -> None:
    events = TierEvents(FakeFactory(), GROUPS)
    stored(events, 1, A, kept={A})
    events.removed([A])
    events.removed([A])
    stored(events, 2, A, kept={A})
    assert short(events) == [("stored", A), ("removed", A), ("stored", A)]


def test_a_block_is_announced_with_the_tokens_that_its_group_keeps_in_it() -> None:
    groups = KvGroups([KvGroup(0, 64), KvGroup(1, 16), KvGroup(2, 64, STATE)], 16)
    events = TierEvents(FakeFactory(), groups)
    keys = [block_key(b"x", group) for group in (0, 1, 2)]
    blocks = tuple(SimpleNamespace(block_hash=key) for key in [*keys, keys[2]])
    keys = [block.block_hash for block in blocks]
    events.describe(1, "request", keys, [128, 128, 128, 144])
    events.stored(1, set(keys))
    spans = [(64, 128), (112, 128), (64, 128), (128, 144)]  # the last ends amid its block
    assert [event[3] for event in events.take()] == spans
