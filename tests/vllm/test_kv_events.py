"""KV events of DRAM blocks: routers hear of a block when it is there, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, maybe_convert_block_hash

from continuum_connector.scheduler.kv_groups import block_key
from continuum_connector.vllm.compat import KvEventFactory
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    SLOT_BYTES,
    Costs,
    come_to_rest,
    hold,
    outlast_pins,
    park,
    run_turn,
    skip_without_tier,
    tiered,
)

GROUPS = pytest.mark.parametrize("groups", ["full", "hybrid"])


class EventEngine(Engine):
    """An engine whose published KV events are kept in `events`; VRAM's are left out unless it
    `hears_of_vram`."""

    def __init__(self, num_slots: int = 400, hears_of_vram: bool = False, **kwargs: Any) -> None:
        self.events: list[Any] = []
        self._media = ("CPU", "STORAGE", *(["GPU"] if hears_of_vram else []))
        config = {"dram_bytes": num_slots * SLOT_BYTES} | kwargs.pop("config", {})
        super().__init__(200, extra_config=config, **kwargs)

    def _build_scheduler(self, num_blocks: int) -> None:
        self.vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
        super()._build_scheduler(num_blocks)
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        self.events += [e for e in batch.events if getattr(e, "medium", "CPU") in self._media]

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
    assert {event.group_idx for event in events} == set(range(len(engine.groups)))


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
    assert {group for _, group in in_dram} == set(range(len(engine.groups)))
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
    spans = 2 * [(16 * index, 16 * index + 16) for index in reversed(range(100))]
    events = KvEventFactory().stored(request, spans, len(spans) * [bytes(36)], 16)
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
    assert not engine.connector.side.tier.events._pending


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


def seen_by_router(events: list[Any]) -> set[tuple[str, Any]]:
    """Which blocks a router takes to be where, once it has heard all of that."""
    seen: set[tuple[str, Any]] = set()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            seen.clear()
            continue
        blocks = {(event.medium, each) for each in event.block_hashes}
        seen = seen | blocks if isinstance(event, BlockStored) else seen - blocks
    return seen


@pytest.mark.parametrize("how", ["reset", "weights", "version"])
@pytest.mark.parametrize("again", ["the same", "another"])
def test_over_a_new_epoch_a_router_knows_what_is_there_and_nothing_else(
    how: str, again: str
) -> None:
    """`again`: the prompt that comes first in it, whose blocks come to VRAM in its first step."""
    engine = EventEngine(hears_of_vram=True)
    run_turn(engine, "a", 200, program="p")
    outlast_pins(engine)
    if how == "reset":
        assert engine.reset_prefix_cache(reset_connector=True)
    elif how == "weights":  # which compute the same, for the oracle's sake
        engine.worker._report.new_weights = "update_weights"
        run_turn(engine, "x", 40, seed=7, program="x")
    else:
        engine.scheduler._continuum.resets._version_now = lambda: "another"
    run_turn(engine, "b", 200, seed=0 if again == "the same" else 8, program="q")
    outlast_pins(engine)
    seen = seen_by_router(engine.events)
    keys = [block.block_hash for block in engine.pool.blocks if block.block_hash]
    assert {each for medium, each in seen if medium == "GPU"} == set(map(named, keys))
    index = engine.connector.side.tier.index
    assert {each for medium, each in seen if medium == "CPU"} == set(map(named, index._numbers))


def named(key: bytes) -> Any:
    return maybe_convert_block_hash(key[:-4])


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
    assert not seen_by_router(engine.events)
    engine.events = []
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


@pytest.mark.parametrize("ends", ["disk", "dram"])
def test_blocks_that_come_to_disk_and_leave_it_are_announced_without_tokens(ends: str) -> None:
    """And what is read back is in DRAM again, with tokens."""
    disk = {"disk_path": "/disk", "disk_bytes": "1GiB"}
    engine = EventEngine(num_slots=16, config=disk)
    engine.worker.report_disk(100)
    reading = engine.connector.side.tier.below.reading
    reading._plan = replace(reading._plan, costs=Costs())
    for number in range(3):
        run_turn(engine, f"r{number}", 200, seed=number, program=f"p{number}")
        park(engine)
        come_to_rest(engine)
    engine.step()
    told = [e for e in engine.events if getattr(e, "medium", "") == "STORAGE"]
    if not hasattr(kv_events, "MEDIUM_STORAGE"):
        assert told == []
        return
    hashes = [each for event in told for each in event.block_hashes]
    assert sorted(hashes, key=repr) == sorted(
        (maybe_convert_block_hash(key[:-4]) for key, _ in engine.worker.disk.slots.values()),
        key=repr,
    )
    assert {type(event) for event in told} == {BlockStored}
    assert [event.token_ids for event in told] == [[]] * len(told)
    engine.events = []
    run_turn(engine, "again", engine.next_prompt("r0", 10), program="p0")
    num_read = engine.kv_transfer_params["again"]["continuum"]["cached_tokens"]["disk"] // 16
    back = [e for e in engine.events if type(e) is BlockStored and e.medium == "CPU"]
    assert num_read > 0
    assert [event.block_hashes[0] for event in back[:num_read]] == engine.hashes("r0")[:num_read]
    assert all(event.token_ids for event in back)
    engine.events = []
    on_disk = list(engine.connector.side.tier.below.index._numbers)
    {"disk": engine.worker.report_disk_down, "dram": engine.worker.report_tier_down}[ends]("gone")
    engine.add("wakes", 20, seed=99)
    engine.step()  # an engine that has nothing to do takes no further one
    gone = [e for e in engine.events if type(e) is BlockRemoved and e.medium == "STORAGE"]
    told = [each for event in gone for each in event.block_hashes]
    assert len(told) == len(set(told))
    assert {*told} >= {*map(maybe_convert_block_hash, (key[:-4] for key in on_disk))} != set()
    engine.events = []
    engine.run_until_idle()
    assert not [e for e in engine.events if e.medium == "STORAGE"]
