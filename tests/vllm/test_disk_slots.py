"""One bad slot of a disk costs that slot: what else its order held is read, written, remembered."""

from __future__ import annotations

import pytest

from continuum_connector.scheduler.tiers.disk import Disk
from continuum_connector.scheduler.tiers.disk_index import DiskIndex
from continuum_connector.scheduler.tiers.traffic import Kind
from tests.vllm.harness import Engine
from tests.vllm.test_disk import come_back, finish, overrun, overrun_with_reads_held
from tests.vllm.tiering import RANKS, in_flight, on_disk, park, run_turn, total

NUM_BLOCKS = 13  # that the disk has of what `a` left


def index_of(engine: Engine) -> DiskIndex:
    tier = engine.connector.side.tier
    assert isinstance(tier.below, Disk)
    return tier.below.index


def break_slots(engine: Engine, *broken: tuple[int, int, str]) -> None:
    """`broken`: a rank, the place of a disk slot in the read under way, and how that ends."""
    (read,) = in_flight(engine, Kind.READ)
    for rank, place, reason in broken:
        engine.workers[rank].disk.bad[int(read.blocks[place])] = reason
    for worker in engine.workers:
        worker.disk.is_held = False


@RANKS
@pytest.mark.parametrize("per_slot", [1, 3])
@pytest.mark.parametrize(("reason", "num_bad"), [("eio", 1), ("corrupt", 0), ("missing", 0)])
def test_a_turn_has_what_was_read_before_a_bad_slot_and_no_other_slot_is_forgotten(
    reason: str, num_bad: int, per_slot: int, world_size: int
) -> None:
    engine = overrun_with_reads_held(per_slot=per_slot, world_size=world_size)
    come_back(engine, num_steps=2)
    index = index_of(engine)
    num_ready = index.num_ready
    break_slots(engine, (world_size - 1, 2, reason))
    engine.run_until_idle(until=lambda: not in_flight(engine, Kind.READ))
    assert (index.num_ready, index.num_bad) == (num_ready - 1, num_bad)
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    hit = 2 * per_slot * 16
    assert engine.cached["b"] == (0, hit)
    assert engine.kv_transfer_params["b"]["continuum"]["disk"]["not_read"] == "failed"
    assert total(engine, "hit_tokens", "disk") == hit
    assert total(engine, "disk_failures", reason) == 1
    finish(engine)


def test_of_several_ranks_each_bad_slot_counts_and_what_all_have_read_is_right() -> None:
    engine = overrun_with_reads_held(world_size=2)
    come_back(engine, num_steps=2)
    index = index_of(engine)
    num_ready = index.num_ready
    break_slots(engine, (0, 7, "eio"), (1, 4, "corrupt"))
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert engine.cached["b"] == (0, 4 * 16)
    assert index.num_bad == 1
    assert index.num_ready >= num_ready - 2
    finish(engine)


def test_a_rank_that_says_nothing_of_slots_has_copied_none() -> None:
    engine = overrun_with_reads_held(world_size=2)
    come_back(engine, num_steps=2)
    (read,) = in_flight(engine, Kind.READ)
    engine.workers[0].fail(read.id, "refused")
    break_slots(engine, (1, 4, "corrupt"))
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert engine.cached["b"] == (0, 0)
    finish(engine)


def test_a_turn_has_what_came_of_a_read_that_was_late() -> None:
    """It still waits, because its own time began later than the read's."""
    engine = overrun_with_reads_held()
    come_back(engine, num_steps=2)
    (read,) = in_flight(engine, Kind.READ)
    engine.worker.disk.after = 5
    engine.connector.side.traffic.ledger.cancel(read)  # as Traffic does
    engine.run_until_idle(until=lambda: "b" in engine.finish_reasons)
    assert engine.cached["b"] == (0, 5 * 16)
    assert index_of(engine).num_bad == 0
    finish(engine)


@RANKS
@pytest.mark.parametrize("per_slot", [1, 3])
@pytest.mark.parametrize(("reason", "num_bad"), [("eio", 1), ("enospc", 0), ("cancelled", 0)])
def test_what_was_written_before_a_bad_slot_is_on_disk_and_the_rest_is_written_again(
    reason: str, num_bad: int, per_slot: int, world_size: int
) -> None:
    engine = on_disk(per_slot=per_slot, world_size=world_size)
    disk, index = engine.workers[-1].disk, index_of(engine)
    engine.idle(0.5)  # the disk opens
    disk.refuses_with, disk.after = reason, 2
    run_turn(engine, "a", 200, program="a")
    park(engine)
    for _ in range(50):
        if total(engine, "writes", "failed"):
            break
        engine.idle(0.02)
    assert (index.num_ready, index.num_bad) == (2, num_bad)
    disk.refuses_with = ""
    overrun(engine)
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, NUM_BLOCKS // per_slot * per_slot * 16)
    finish(engine)


def test_a_turn_finds_what_lies_behind_a_slot_that_went_bad_once_that_is_written_anew() -> None:
    engine = overrun_with_reads_held()
    come_back(engine, num_steps=2)
    break_slots(engine, (0, 6, "eio"))
    engine.run_until_idle()
    overrun_again(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="a")
    assert engine.cached["c"][1] >= NUM_BLOCKS * 16
    finish(engine)


def overrun_again(engine: Engine) -> None:
    park(engine)
    for number in range(5):
        run_turn(engine, f"more{number}", 200, seed=40 + number, program=f"more{number}")
        park(engine)
