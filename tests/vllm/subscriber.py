"""Subscriber: a router that hears all KV events of an engine, and may believe each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from continuum_connector.scheduler.tiers.disk import Disk
from tests.vllm.harness import Engine
from tests.vllm.tiering import dram_of

HAS_GROUPS = "group_idx" in BlockRemoved.__struct_fields__
Named = set[tuple[Any, int]]


class Subscriber:
    """Knows of each memory which blocks it has, by what an engine that `publishes` has said."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.believes: dict[str, Named] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        engine.scheduler.kv_event_publisher.publish = lambda batch: self._hear(batch.events)

    def check(self) -> None:
        """Assert that nothing is believed to be where it is not, once all is heard."""
        self._hear(self._engine.scheduler.kv_cache_manager.take_events() or ())
        self._hear(self._engine.connector.take_events())
        vram = self._engine.pool.cached_block_hash_to_block._cache
        assert self.believes["GPU"] <= _named(vram)
        dram, tier = dram_of(self._engine), self._engine.connector.side.tier
        if dram is not None:
            ready = filter(dram.index.is_ready, dram.index._numbers)
            assert self.believes["CPU"] <= _named(ready)
        if isinstance(tier.below, Disk):
            assert self.believes["STORAGE"] <= _named(tier.below.index._numbers)

    def _hear(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for believed in self.believes.values():
                    believed.clear()
                continue
            group = event.group_idx if HAS_GROUPS else 0
            blocks = {(block, group) for block in event.block_hashes}
            if isinstance(event, BlockStored):
                self.believes[event.medium] |= blocks
            else:
                self.believes[event.medium] -= blocks


def _named(keys: Iterable[bytes]) -> Named:
    """The blocks with these keys, as events name them."""
    return {
        (maybe_convert_block_hash(key[:-4]), int.from_bytes(key[-4:], "big") * HAS_GROUPS)
        for key in keys
    }
