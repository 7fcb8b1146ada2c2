"""KV events of DRAM blocks: routers hear of a block when it is there, and when it is not."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, maybe_convert_block_hash

from continuum_connector.scheduler.kv_groups import block_key
from continuum_connector.vllm.kv_events import KvEventFactory
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    SLOT_BYTES,
    hold,
    outlast_pins,
    park,
    run_turn,
    skip_without_tier,
    tiered,
)

GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])


class EventEngine(Engine):
    """An engine whose published KV events are kept in `events`, VRAM's left out."""

    def __init__(self, num_slots: int = 400, **kwargs: Any) -> None:
        self.events: list[Any] = []
        super().__init__(200, extra_config={"dram_bytes": num_slots * SLOT_BYTES}, **kwargs)

    def _build_scheduler(self, num_blocks: int, block_size: int) -> None:
        self.vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
        super()._build_scheduler(num_blocks, block_size)
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        self.events += [e for e in batch.events if getattr(e, "medium", "CPU") == "CPU"]

    def take(self, kind: type) -> list[Any]:
        """Return the events of `kind` since the last take, and forget all others."""
        events, self.events = self.events, []
        assert all(isinstance(event, kind) for event in events)
        return events

    def hashes(self, request_id: str) -> list[Any]:
        return [maybe_convert_block_hash(h) for h in self.requests[request_id].block_hashes]


@GROUPS
def test_a_stored_block_is_announced_with_its_parent_and_tokens_once_it_is_there(
    groups: str,
) -> None:
    skip_without_tier(groups)
    engine = EventEngine(groups=groups, hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    for _ in range(3):
        engine.step()
    assert engine.take(BlockStored) == []
    engine.settle()
    engine.run_until_idle()
    events = engine.take(BlockStored)
    tokens, hashes = list(engine.requests["a"].all_token_ids), engine.hashes("a")
    assert len({(event.block_hashes[0], event.group_idx) for event in events}) == len(events)
    assert len(events) == engine.worker.num_blocks_stored
    assert [event.block_hashes[0] for event in events if event.group_idx == 0] == hashes[:13]
    for event in events:
        index = hashes.index(event.block_hashes[0])
        assert event.parent_block_hash == (hashes[index - 1] if index else None)
        assert event.token_ids == tokens[index * 16 : index * 16 + 16]
        assert (event.block_size, event.lora_id) == (16, None)
    assert {event.group_idx for event in events} == set(range(len(engine.windows)))


def images(*places: tuple[int, int]) -> list[MultiModalFeatureSpec]:
    """Images `0`, `1`, ... at these offsets, so many tokens long."""
    return [
        MultiModalFeatureSpec(None, "image", str(number), PlaceholderRange(*place))
        for number, place in enumerate(places)
    ]


def takes_images(engine: Engine) -> None:
    """Give the scheduler the room for images that it would have with a model that sees them."""
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)


@GROUPS
def test_a_block_is_announced_with_all_that_vllm_announces_it_with(groups: str) -> None:
    """A router that hashes tokens itself needs salt and images too, or takes it for another."""
    skip_without_tier(groups)
    engine = EventEngine(groups=groups)
    takes_images(engine)
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    run_turn(
        engine,
        "a",
        120,
        program="p",
        cache_salt="tenant",
        lora_request=LoRARequest("sql", 3, "/adapters/sql"),
        mm_features=images((4, 6), (10, 30), (41, 3), (80, 16)),
    )
    stored = [event for event in published if isinstance(event, BlockStored)]
    in_vram = {
        (block, event.group_idx): (keys, event.lora_id, event.lora_name)
        for event in stored
        if event.medium == "GPU"
        # Where a step left every block of a group out, vLLM announces none, without keys.
        for block, keys in zip(event.block_hashes, event.extra_keys or (), strict=True)
    }
    in_dram = {
        (event.block_hashes[0], event.group_idx): (
            *event.extra_keys,
            event.lora_id,
            event.lora_name,
        )
        for event in stored
        if event.medium == "CPU"
    }
    assert {group for _, group in in_dram} == set(range(len(engine.windows)))
    assert in_dram == {block: in_vram[block] for block in in_dram}
    assert [in_dram[block, 0][0] for block in engine.hashes("a")[:8]] == [
        ("sql", ("0", 4), ("1", 10), "tenant"),
        ("sql", ("1", -6)),
        ("sql", ("1", -22), ("2", 9)),
        ("sql",),
        ("sql",),
        ("sql", ("3", 0)),
        ("sql",),
        ("sql",),
    ]


class Looks(list[Any]):
    """A list that counts how often one of its entries is looked at."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        return super().__getitem__(index)


def test_images_are_gone_through_once_per_store_whatever_the_groups_and_the_order() -> None:
    engine = EventEngine()
    request = engine.add("a", 1600, cache_salt="tenant")
    request.mm_features = Looks(images(*((16 * index, 16) for index in range(100))))
    indexes = 2 * list(reversed(range(100)))
    events = KvEventFactory().stored(request, indexes, len(indexes) * [bytes(36)], 16)
    assert [event.extra_keys[0][0] for event in events] == 2 * [
        (str(index), 0) for index in reversed(range(100))
    ]
    assert request.mm_features.count <= 3 * 100  # last, own, and where the block before ended


def test_a_second_turn_announces_only_what_is_new() -> None:
    engine = EventEngine()
    run_turn(engine, "a", 200, program="p")
    engine.take(BlockStored)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    events = engine.take(BlockStored)
    assert [event.block_hashes[0] for event in events] == engine.hashes("b")[13:15]
    assert events[0].parent_block_hash == engine.hashes("a")[12]


def test_a_failed_store_announces_nothing() -> None:
    engine = EventEngine(hold_transfers=True)
    run_turn(engine, "a", 200, program="p", idle=False)
    engine.fail()
    engine.run_until_idle()
    assert engine.events == []
    assert not engine.connector.side.tier._events._pending


def test_an_evicted_block_is_taken_back_and_can_be_announced_again() -> None:
    engine = EventEngine(num_slots=15)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    engine.take((BlockStored, AllBlocksCleared))
    run_turn(engine, "b", 100, seed=3, program="q")  # seven blocks: five of p's leave
    engine.step()
    gone = [e.block_hashes[0] for e in engine.events if isinstance(e, BlockRemoved)]
    assert gone == engine.hashes("a")[12:7:-1]
    here = [e.block_hashes[0] for e in engine.events if isinstance(e, BlockStored)]
    assert here == engine.hashes("b")[:7]
    kinds = [type(event) for event in engine.events]
    assert kinds == sorted(kinds, key=lambda kind: kind is BlockStored)  # first out, then in
    engine.events = []
    park(engine)
    run_turn(engine, "c", engine.next_prompt("a", 0), program="p")
    engine.run_until_idle()
    back = [e.block_hashes[0] for e in engine.events if isinstance(e, BlockStored)]
    assert back == engine.hashes("c")[8:14]


def test_a_reset_clears_all_and_what_was_in_flight_is_never_announced() -> None:
    engine = EventEngine()
    run_turn(engine, "a", 200, program="p")
    engine.take(BlockStored)
    hold(engine)
    run_turn(engine, "b", 100, seed=3, program="q", idle=False)
    assert engine.reset_prefix_cache()
    engine.settle()
    hold(engine, False)
    engine.run_until_idle()
    assert engine.take(AllBlocksCleared)
    run_turn(engine, "c", 40, seed=4, program="r")
    engine.run_until_idle()
    assert len(engine.take(BlockStored)) == 3


def test_a_tier_that_goes_down_takes_back_what_it_announced() -> None:
    engine = EventEngine()
    run_turn(engine, "a", 200, program="p")
    stored = engine.take(BlockStored)
    hold(engine)
    run_turn(engine, "b", 100, seed=3, program="q", idle=False)
    engine.worker.report_tier_down("cannot page-lock")
    engine.settle()  # the last copy succeeds, and comes with the bad news
    engine.run_until_idle()
    removed = engine.take(BlockRemoved)
    assert {e.block_hashes[0] for e in removed} == {e.block_hashes[0] for e in stored}


def test_no_events_without_a_subscriber_and_forgotten_keys_do_not_pile_up() -> None:
    engine = tiered(num_slots=8)
    for turn in range(5):
        run_turn(engine, f"{turn}", 134, seed=turn, program=f"{turn}")
        assert list(engine.connector.take_events()) == []
        assert not engine.connector.side.tier.index.gone
    assert engine.connector.account.total("dram_evicted_blocks") > 8
    outlast_pins(engine)


@pytest.mark.parametrize("group", [0, 1, 7, 300])
def test_a_block_is_named_as_vllm_names_it(group: int) -> None:
    block_hash = bytes(range(32))
    assert block_key(block_hash, group) == make_block_hash_with_group_id(block_hash, group)
