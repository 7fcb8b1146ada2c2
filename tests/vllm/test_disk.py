"""The disk tier: what DRAM has no room for comes back from disk, block for block."""

from __future__ import annotations

from typing import Any

import pytest

from continuum_connector.scheduler.tiers import disk
from continuum_connector.scheduler.tiers.disk_reading import PROBE_S
from continuum_connector.scheduler.tiers.disk_saving import RETRY_S
from continuum_connector.scheduler.tiers.traffic import HANGS_AFTER_S, LOOK_S, Kind
from continuum_connector.vllm import served
from tests.vllm.fake_worker import OF_DISK, WriteOrder
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import (
    MODES,
    RANKS,
    Costs,
    answers_as_without_a_tier,
    assert_drained,
    check,
    come_to_rest,
    hold,
    in_flight,
    on_disk,
    outlast_pins,
    park,
    run_turn,
    total,
)

PER_SLOT = pytest.mark.parametrize("per_slot", [1, 3])


def overrun(engine: Engine, num_programs: int = 5) -> None:
    """`a` has a turn of 13 full blocks, then others until DRAM has nothing of it any more."""
    run_turn(engine, "a", 200, program="a")
    park(engine)
    for number in range(num_programs):
        run_turn(engine, f"other{number}", 200, seed=10 + number, program=f"other{number}")
        park(engine)
        come_to_rest(engine)


def overrun_with_reads_held(**kwargs: Any) -> Engine:
    """An engine whose disk has what `a` left, and from now on keeps whoever reads waiting."""
    engine = on_disk(**kwargs)
    overrun(engine)
    for worker in engine.workers:
        worker.disk.is_held = True
    return engine


def come_back(engine: Engine, request_id: str = "b", num_steps: int = 0) -> None:
    engine.add(request_id, engine.next_prompt("a", 20), program="a")
    for _ in range(num_steps):
        engine.step()


def finish(engine: Engine) -> None:
    """Whatever is held is held no more; all is answered right, and nothing is left."""
    hold(engine, False)
    for worker in engine.workers:
        worker.disk.is_held = False
    engine.run_until_idle()
    assert answers_as_without_a_tier(engine)
    outlast_pins(engine)
    come_to_rest(engine)
    assert_drained(engine)


@MODES
@RANKS
@PER_SLOT
def test_a_turn_that_dram_lost_comes_back_from_disk(
    async_scheduling: bool, world_size: int, per_slot: int
) -> None:
    engine = on_disk(async_scheduling=async_scheduling, world_size=world_size, per_slot=per_slot)
    overrun(engine)
    come_back(engine)
    engine.run_until_idle()
    hit = 13 // per_slot * per_slot * 16
    assert engine.cached["b"] == (0, hit)
    found = engine.kv_transfer_params["b"]["continuum"]["cached_tokens"]
    assert found == {"vram": 0, "dram": 0, "disk": hit}
    assert total(engine, "hit_tokens", "disk") == hit
    assert total(engine, "disk_read_bytes") == 13 // per_slot * per_slot * world_size
    finish(engine)


@MODES
def test_a_turn_waits_for_its_reads_without_vram_and_others_pass_it(async_scheduling: bool) -> None:
    engine = overrun_with_reads_held(async_scheduling=async_scheduling)
    come_back(engine, num_steps=5)
    assert engine.requests["b"].num_computed_tokens == 0
    assert engine.usage() == 0
    assert not in_flight(engine, Kind.LOAD)
    run_turn(engine, "c", 40, seed=99, idle=False)
    assert engine.finish_reasons.keys() >= {"c"}
    assert "b" not in engine.finish_reasons
    for worker in engine.workers:
        worker.disk.is_held = False
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 208)
    finish(engine)


@MODES
@pytest.mark.parametrize(("prefill", "deadline"), [(1e-2, 1.0), (1e-3, 2 * 208e-3)])
def test_a_turn_waits_until_its_deadline_and_never_again(
    async_scheduling: bool, prefill: float, deadline: float
) -> None:
    """The deadline is disk_timeout_s, or twice what it would take to compute what is read."""
    engine = overrun_with_reads_held(
        async_scheduling=async_scheduling,
        config={"disk_timeout_s": 1.0},
        costs=Costs(prefill=prefill),
    )
    began = engine.clock()
    come_back(engine)
    engine.run_until_idle(until=lambda: bool(engine.requests["b"].num_computed_tokens))
    assert deadline <= engine.clock() - began <= deadline + 0.1
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    assert total(engine, "reads", "cancelled") == 1
    finish(engine)


def test_what_left_vram_while_a_turn_was_in_the_queue_is_read_when_it_is_asked_for() -> None:
    engine = on_disk()
    overrun(engine)
    ahead = engine.connector.side.waits.from_below
    ahead._num_in_vram = lambda request: 208
    come_back(engine)
    assert not in_flight(engine, Kind.READ)
    del ahead._num_in_vram
    engine.clock.advance(1.0)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 208)
    finish(engine)


@pytest.mark.parametrize(("queued_s", "patience_s"), [(2.0, 2 * 208e-3), (6.0, 0.0)])
def test_who_has_waited_in_the_queue_is_passed_over_as_long_as_anybody(
    queued_s: float, patience_s: float
) -> None:
    """Unless the disk has been silent for longer than disk_timeout_s by then."""
    engine = overrun_with_reads_held(costs=Costs(prefill=1e-3))
    come_back(engine)
    engine.clock.advance(queued_s)
    began = engine.clock()
    engine.run_until_idle(until=lambda: bool(engine.requests["b"].num_computed_tokens))
    assert patience_s <= engine.clock() - began <= patience_s + 0.1
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    finish(engine)


def test_what_came_by_the_deadline_is_loaded_and_the_rest_is_computed() -> None:
    engine = overrun_with_reads_held(config={"disk_timeout_s": 1.0}, read_bytes=4 * 4096)
    come_back(engine, num_steps=2)
    first, *others = in_flight(engine, Kind.READ)
    assert (len(first), len(others)) == (4, 3)
    engine.settle(first.id)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 64)
    assert engine.kv_transfer_params["b"]["continuum"]["cached_tokens"]["disk"] == 64
    finish(engine)


def test_a_turn_that_went_away_reads_no_more_than_has_begun() -> None:
    engine = overrun_with_reads_held()
    come_back(engine)
    engine.abort("b")
    assert not in_flight(engine, Kind.READ)
    assert total(engine, "reads", "abandoned") == 1
    come_back(engine, "c", num_steps=2)
    engine.abort("c")
    engine.step()
    engine.step()
    assert not in_flight(engine, Kind.READ)
    assert total(engine, "reads", "cancelled") == 1
    check(engine)


def test_what_a_load_finds_wrong_is_forgotten_on_disk_as_well() -> None:
    """It may have been written from there, with a sum that is right."""
    engine = on_disk(num_slots=60)
    run_turn(engine, "a", 200, program="a")
    park(engine)
    come_to_rest(engine)
    assert engine.connector.side.tier.below.index.num_ready == 13
    hold(engine)
    come_back(engine, num_steps=2)
    [load] = in_flight(engine, Kind.LOAD)
    engine.fail(load.id, "corrupt")
    engine.step()
    engine.step()
    assert engine.connector.side.tier.below.index.num_ready == 0
    finish(engine)
    assert engine.cached["b"] == (0, 0)


def test_what_a_load_finds_wrong_is_forgotten_wherever_it_was_written() -> None:
    """Also in disk slots that end behind what was loaded, or with another fork's block."""
    engine = on_disk(num_slots=90, per_slot=3)
    run_turn(engine, "a", 200, program="a")
    fork = engine.next_prompt("a", 0)[:64] + engine.next_prompt("a", 60, seed=7)[-60:]
    run_turn(engine, "fork", fork, program="f")
    park(engine)
    come_to_rest(engine)
    disk = engine.connector.side.tier.below.index
    assert disk.num_ready == 4 + 2 - 1  # the first one is common to both
    hold(engine)
    engine.add("short", fork[:64] + [99] * 5, program="s")
    engine.step()
    engine.step()
    [load] = in_flight(engine, Kind.LOAD)
    assert len(load) == 4
    engine.fail(load.id, "corrupt")
    engine.step()
    engine.step()
    assert disk.num_ready == 2
    finish(engine)


def test_two_turns_that_want_the_same_wait_for_one_read() -> None:
    engine = overrun_with_reads_held()
    come_back(engine, num_steps=2)
    engine.add("fork", engine.next_prompt("a", 30, seed=7), program="f")
    engine.step()
    [read] = in_flight(engine, Kind.READ)
    engine.abort("b")
    engine.step()
    assert not read.cancelled
    for worker in engine.workers:
        worker.disk.is_held = False
    engine.run_until_idle()
    assert engine.cached["fork"] == (0, 208)
    assert engine.worker.disk.num_read == 13


@MODES
@RANKS
def test_a_reset_amid_reads_and_writes_leaves_nothing_to_be_found(
    async_scheduling: bool, world_size: int
) -> None:
    engine = overrun_with_reads_held(async_scheduling=async_scheduling, world_size=world_size)
    run_turn(engine, "more", 300, seed=77, program="more", idle=False)
    come_back(engine, num_steps=3)
    engine.clock.advance(1.0)  # until DRAM is looked through again, a chain in each step
    for _ in range(8):
        engine.step()
    assert in_flight(engine, Kind.READ)
    assert in_flight(engine, Kind.WRITE)
    engine.connector.reset_cache()
    check(engine)
    assert engine.connector.side.tier.below.index.num_ready == 0
    engine.step()
    engine.step()
    assert [worker.disk.num_resets for worker in engine.workers] == [1] * world_size
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    park(engine)
    come_back(engine, "c")
    engine.run_until_idle()
    assert engine.kv_transfer_params["c"]["continuum"]["cached_tokens"]["disk"] == 0
    finish(engine)
    assert total(engine, "reads", "done") == 0


def test_a_write_that_had_not_left_is_not_written_after_a_reset() -> None:
    engine = on_disk(num_slots=20)
    side = engine.connector.side
    side.tier.below.step = lambda now: None
    run_turn(engine, "a", 280, program="a")
    park(engine)
    side.tier.below._write(engine.clock())
    assert in_flight(engine, Kind.WRITE)
    engine.connector.reset_cache()
    assert not in_flight(engine, Kind.WRITE)
    come_to_rest(engine)
    assert engine.worker.disk.num_written == 0
    check(engine)


@MODES
def test_a_disk_that_hangs_is_given_up_and_dram_goes_on(
    async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = overrun_with_reads_held(async_scheduling=async_scheduling)
    engine.worker.cancels_late = True
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)  # it waited for its deadline, then it was computed
    park(engine)
    assert engine.usage() == 0
    tier, began, num_steps = engine.connector.side.tier, engine.clock(), engine.num_steps
    engine.idle(HANGS_AFTER_S + 10)
    assert engine.num_steps - num_steps <= engine.clock() - began + 20  # once a second
    assert "No disk tier: read" in caplog.text
    assert (tier.is_up, tier.below.index.is_open) == (True, False)
    tier.update_gauges()
    assert total(engine, "disk_up") == 0
    assert total(engine, "disk_oldest_op_seconds") > HANGS_AFTER_S
    run_turn(engine, "c", engine.next_prompt("b", 20), program="a")
    assert engine.cached["c"][1] > 0  # from DRAM
    assert any(isinstance(each.order, OF_DISK) for each in engine.worker.pending.values())
    finish(engine)


@MODES
@pytest.mark.parametrize("hung_s", [HANGS_AFTER_S / 2, HANGS_AFTER_S + 10])
def test_a_disk_that_answers_again_ends_its_alert_on_an_idle_server_given_up_or_not(
    async_scheduling: bool, hung_s: float
) -> None:
    engine = overrun_with_reads_held(async_scheduling=async_scheduling)
    engine.worker.cancels_late = True
    come_back(engine)
    engine.run_until_idle()
    engine.idle(hung_s)
    assert published(engine, "disk_oldest_op_seconds") >= hung_s
    is_given_up = hung_s > HANGS_AFTER_S
    assert published(engine, "disk_up") == (not is_given_up)
    engine.worker.disk.is_held = False
    engine.idle(2 * LOOK_S)
    assert published(engine, "disk_oldest_op_seconds") == 0
    assert published(engine, "disk_up") == (not is_given_up), "until a restart"
    finish(engine)


def published(engine: Engine, gauge: str) -> float:
    """What /metrics shows: the last value that left the engine with a step."""
    told = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    payloads = [getattr(each, "data", each) for each in told]
    gauges = [each["gauges"] for each in payloads if "gauges" in each]
    return float(next(each[gauge] for each in reversed(gauges) if gauge in each))


def test_a_rank_that_lacks_what_the_others_have_fails_the_read_for_all() -> None:
    engine = on_disk(world_size=2)
    overrun(engine)
    engine.workers[1].disk.slots.clear()
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    assert total(engine, "disk_failures", "missing") == 1
    finish(engine)


@RANKS
def test_a_restart_finds_what_all_ranks_have(world_size: int) -> None:
    engine = on_disk(world_size=world_size)
    overrun(engine)
    files = [worker.disk for worker in engine.workers]
    before = engine.next_prompt("a", 20)
    lost = max(files[-1].slots)
    del files[-1].slots[lost]
    again = on_disk(world_size=world_size, files=files)
    again.step()
    index = again.connector.side.tier.below.index
    assert index.num_ready == len(files[-1].slots)
    run_turn(again, "b", before, program="a")
    assert again.cached["b"] == (0, 208)
    check(again)
    assert answers_as_without_a_tier(again)


@RANKS
def test_writing_begins_when_every_rank_has_told_all_that_a_restart_found(world_size: int) -> None:
    """However soon: the first prompts are lost if it waits for some seconds. However late: what is
    not told yet would be written once more."""
    engine = on_disk(num_slots=200, world_size=world_size)
    for worker in engine.workers[1:] or engine.workers:
        worker._report.disk_scanned.clear()
    run_turn(engine, "a", 100, idle=False)
    engine.idle(60.0)
    assert total(engine, "stores", "done")
    assert not engine.worker.disk.num_written
    for worker in engine.workers:
        worker._report.disk_scanned.add(worker.rank)
    engine.idle(1.0)
    assert engine.worker.disk.num_written
    finish(engine)


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_whose_disks_open_at_other_times_find_the_same(first: int) -> None:
    engine = on_disk(world_size=2)
    overrun(engine)
    files = [worker.disk for worker in engine.workers]
    again = on_disk(world_size=2, files=files, open_disks=False)
    index = again.connector.side.tier.below.index
    for rank in (first, 1 - first):
        assert index.num_ready == 0
        again.workers[rank].report_disk(200)
        again.idle(1.0)
    assert index.num_ready == len(files[0].slots)


@pytest.mark.parametrize(("pause_s", "num_read"), [(0.0, 0), (PROBE_S, 1)])
def test_a_disk_that_seemed_too_slow_is_asked_again_now_and_then(
    pause_s: float, num_read: int
) -> None:
    engine = on_disk(costs=Costs(read=1e3))
    overrun(engine)
    engine.connector.side.tier.below.reading.began = engine.clock()
    engine.worker.disk.num_read = 0
    engine.idle(pause_s)
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"][1] <= 16, "nobody waits for it"
    assert engine.worker.disk.num_read == num_read
    finish(engine)


def test_before_anything_is_known_of_prompts_a_turn_waits_as_long_as_it_may() -> None:
    engine = on_disk(costs=Costs(prefill=1e-9, knows_prefill=False))
    overrun(engine)
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 208)
    finish(engine)


def test_a_disk_smaller_than_dram_is_not_written_over_and_over() -> None:
    engine = on_disk(num_slots=100, disk_slots=8, config={"policy": "lru_offload"})
    for number in range(6):
        run_turn(engine, f"p{number}", 200, seed=number, program=f"p{number}")
        park(engine)
    come_to_rest(engine)
    engine.idle(60.0)
    num_written, num_steps = engine.worker.disk.num_written, engine.num_steps
    engine.idle(60.0)
    assert engine.worker.disk.num_written == num_written
    assert engine.num_steps - num_steps <= 1


def test_an_idle_engine_sleeps_though_the_other_rank_has_its_disk() -> None:
    engine = on_disk(world_size=2, open_disks=False)
    engine.workers[0].report_disk_down("no room")
    run_turn(engine, "a", 20)
    engine.workers[1].report_disk(200)
    run_turn(engine, "b", 20)
    outlast_pins(engine)
    num_steps = engine.num_steps
    engine.idle(20.0)
    assert engine.num_steps - num_steps <= 1


def test_an_idle_engine_writes_what_came_between_two_looks() -> None:
    """Else a restart finds nothing of the last turns."""
    engine = on_disk(num_slots=100, config={"policy": "lru_offload"})
    engine.idle(10.0)
    for number in range(3):
        run_turn(engine, f"p{number}", 100, max_tokens=1, seed=number, program=f"p{number}")
        engine.idle(2.5)
    engine.idle(10.0)
    assert engine.connector.side.tier.index.num_ready == 18
    assert engine.worker.disk.num_written == 18
    num_steps = engine.num_steps
    engine.idle(20.0)
    assert engine.num_steps - num_steps <= 1


@pytest.mark.parametrize(
    ("reason", "num_reads", "goes_down"),
    [("corrupt", 3, True), ("eio", 3, True), ("missing", 3, False)],
)
def test_a_disk_that_gives_what_is_wrong_is_given_up_after_a_few_times(
    reason: str,
    num_reads: int,
    goes_down: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "MAX_CORRUPT", 3)
    engine = on_disk()
    overrun(engine)
    for number in range(num_reads):
        assert engine.connector.side.tier.below.index.is_open
        engine.worker.disk.fails_with = reason
        num_failed = total(engine, "reads", "failed")
        name = ("a", "other0", "other1")[number]
        run_turn(engine, f"again{number}", engine.next_prompt(name, 5), program=name, final=True)
        assert total(engine, "reads", "failed") == num_failed + 1
        assert engine.cached[f"again{number}"] == (0, 0)
        engine.worker.disk.fails_with = ""
        park(engine)
    assert engine.connector.side.tier.below.index.is_open is not goes_down
    assert ("No disk tier" in caplog.text) is goes_down
    assert engine.connector.side.tier.is_up
    finish(engine)


@pytest.mark.parametrize("reason", ["enospc", "driver"])
def test_a_disk_that_takes_no_write_is_read_and_not_written(reason: str) -> None:
    """Full, or for a cause that need not pass, as no memory is: it is not asked for ever."""
    engine = on_disk()
    overrun(engine)
    engine.worker.disk.refuses_with = reason
    ask_more(engine, 6)
    num_failed = total(engine, "disk_failures", reason)
    assert num_failed >= 3, "attempts, of several writes each"
    assert (total(engine, "disk_up"), total(engine, "disk_writable")) == (1, 0)
    run_turn(engine, "soon", 200, seed=60, program="soon")
    come_to_rest(engine)
    assert total(engine, "disk_failures", reason) == num_failed
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 208)
    finish(engine)


def ask_more(engine: Engine, num_programs: int, first: int = 50) -> None:
    for number in range(first, first + num_programs):
        run_turn(engine, f"more{number}", 200, seed=number, program=f"more{number}")
        park(engine)
        come_to_rest(engine)
    engine.connector.side.update_gauges()


def test_writing_begins_again_once_a_try_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    engine = on_disk()
    overrun(engine)
    engine.worker.disk.refuses_with = "enospc"
    ask_more(engine, 6)
    num_failed = total(engine, "disk_failures", "enospc")
    engine.clock.advance(RETRY_S)
    ask_more(engine, 3, first=60)
    assert total(engine, "disk_failures", "enospc") == num_failed + 1, "one try"
    engine.worker.disk.refuses_with = ""
    num_written = engine.worker.disk.num_written
    engine.clock.advance(RETRY_S)
    ask_more(engine, 6, first=70)
    assert total(engine, "disk_writable") == 1
    assert engine.worker.disk.num_written > num_written + 13
    said = [each.message for each in caplog.records if each.message.startswith("The disk ")]
    assert [text[:17] for text in said] == ["The disk is full,", "The disk takes wr"]
    finish(engine)


def test_a_disk_that_goes_with_its_dram_says_nothing_of_dram_going_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank tells of both at once (ContinuumWorker.disable)."""
    engine = overrun_with_reads_held()
    come_back(engine, num_steps=2)
    engine.worker.report_tier_down("the driver failed")
    engine.worker.report_disk_down("there is no DRAM tier any more")
    finish(engine)
    assert engine.connector.side.tier.down_reason == "the driver failed"
    assert not [each.message for each in caplog.records if "goes on" in each.message]


def test_errors_of_one_moment_are_one_and_those_of_other_hours_do_not_count() -> None:
    """A drive that is away for a second fails all that is under way, and is there again."""
    engine = on_disk()
    overrun(engine, 8)
    disk = engine.worker.disk
    for hour, names in enumerate([("a", "other0"), ("other1",), ("other2",), ("other3",)]):
        disk.fails_with, disk.is_held = "eio", True
        for name in names:
            tokens = engine.next_prompt(name, 5)
            engine.add(f"{name}{hour}", tokens, program=name, final=True)
        engine.step()
        engine.step()
        disk.is_held = False
        engine.run_until_idle()
        disk.fails_with = ""
        park(engine)
        engine.clock.advance(2000.0)
    assert total(engine, "reads", "failed") == 5
    assert engine.connector.side.tier.below.index.is_open
    finish(engine)


def test_a_disk_that_fails_for_good_says_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    """Its own errors have a rule of their own: nothing is read any more either."""
    engine = on_disk()
    overrun(engine)
    engine.worker.disk.refuses_with = "eio"
    ask_more(engine, 6)
    said = [each.message for each in caplog.records if " disk " in each.message]
    assert (
        len([text for text in said if "3 times within an hour (input/output error)" in text]) == 1
    )
    assert not [text for text in said if "takes no writes" in text]


def test_slots_that_a_rank_calls_stale_are_forgotten_and_cost_no_budget() -> None:
    """An epoch that comes back may find slots that a sleep emptied: they were written for ever."""
    engine = on_disk(config={"disk_write_budget": 4096 * 1000})
    engine.worker.disk.refuses_with = "stale"
    overrun(engine)
    num_failed = total(engine, "disk_failures", "stale")
    assert 0 < num_failed <= total(engine, "writes", "failed")
    engine.clock.advance(60.0)
    engine.run_until_idle()
    assert total(engine, "disk_failures", "stale") == num_failed
    engine.connector.side.update_gauges()
    assert total(engine, "disk_budget_fill") == pytest.approx(1.0, abs=0.01)
    come_back(engine)
    engine.run_until_idle()
    assert engine.cached["b"] == (0, 0)
    finish(engine)


def test_what_leaves_before_it_is_written_is_dropped_and_counted() -> None:
    engine = overrun_with_reads_held(num_slots=20)
    for number in range(4):
        run_turn(engine, f"more{number}", 200, seed=50 + number, program=f"more{number}")
        park(engine)
    engine.connector.side.update_gauges()
    assert total(engine, "disk_unsaved_blocks") > 0
    finish(engine)


def test_no_more_is_written_than_the_budget_allows() -> None:
    budget = 20 * 4096  # twenty blocks a day
    engine = on_disk(config={"disk_write_budget": budget})
    overrun(engine, num_programs=12)
    assert engine.clock() - 1000.0 < 1800.0
    assert 0 < engine.worker.disk.num_written <= 20 + 13 + 10
    assert total(engine, "disk_refused_blocks") > 0
    finish(engine)


def test_a_server_that_is_killed_again_and_again_writes_no_more_than_the_budget() -> None:
    """Even if no life finds anything of the one before, as with weights that have no files."""
    engine = on_disk(config={"disk_write_budget": 40 * 4096})
    overrun(engine, num_programs=12)
    disk = engine.worker.disk
    num_written = disk.num_written
    assert 20 < num_written <= 40 + 10
    for _ in range(2):
        disk.slots.clear()
        engine = on_disk(config={"disk_write_budget": 40 * 4096}, files=[disk])
        overrun(engine, num_programs=12)
        finish(engine)
    assert disk.num_written <= num_written + 2


@pytest.mark.parametrize(("ranks", "share"), [((1, 1), 1.0), ((1, 4), 0.25), ((2, 4), 0.5)])
def test_the_engines_of_a_node_share_its_write_budget(
    ranks: tuple[int, int], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they share `disk_bytes`: a drive does not wear out faster with more engines."""
    world_size, node_ranks = ranks
    monkeypatch.setattr(served, "num_node_ranks", lambda _config: node_ranks)
    engine = on_disk(world_size=world_size, config={"disk_write_budget": 4_000_000})
    assert engine.connector.side.tier.below._plan.write_budget == share * 4_000_000
    engine = on_disk(world_size=world_size)
    assert engine.connector.side.tier.below._plan.write_budget == share * 2**30


def test_what_a_finished_program_left_is_not_written() -> None:
    engine = on_disk()
    for number in range(6):
        run_turn(engine, f"r{number}", 200, seed=number, program=f"p{number}", final=True)
        park(engine)
        come_to_rest(engine)
    assert engine.worker.disk.num_written == 0


def found_after_a_question(disk_slots: int, per_slot: int, **said: Any) -> int:
    """Tokens that an agent finds after somebody who shares its system prompt asked a question with
    those fields, and others filled VRAM, DRAM and the disk."""
    engine = on_disk(60, 24, disk_slots // per_slot, per_slot=per_slot)
    shared = prompt(160, seed=77)
    turns: list[tuple[str, list[int], dict[str, Any]]] = [
        ("a", shared + prompt(160, seed=1), {"program": "agent"}),
        ("q", shared + prompt(20, seed=2), said),
        *((name, prompt(320, seed=50 + n), {"program": name}) for n, name in enumerate("xy")),
    ]
    for name, tokens, more in turns:
        run_turn(engine, name, tokens, **more)
        park(engine)
        come_to_rest(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="agent")
    return sum(engine.cached["b"])


@pytest.mark.parametrize("program", ["question", "agent", None], ids=["other", "same-id", "nobody"])
@pytest.mark.parametrize("per_slot", [1, 4])
def test_a_shared_prompt_stays_on_disk_though_its_last_asker_is_done(
    per_slot: int, program: str | None
) -> None:
    """Else what the agent has behind it would be kept, and be useless."""
    for disk_slots in (44, 48, 56):
        goes_on = found_after_a_question(disk_slots, per_slot, program=program)
        is_over = found_after_a_question(disk_slots, per_slot, program=program, final=True)
        assert is_over >= goes_on > 0


def test_blocks_that_forks_share_are_written_once() -> None:
    engine = on_disk(num_slots=60)
    run_turn(engine, "a", 200, program="a")
    for number in range(4):
        tokens = engine.next_prompt("a", 60, seed=number)
        run_turn(engine, f"fork{number}", tokens, program=f"f{number}")
    park(engine)
    come_to_rest(engine)
    disk = engine.worker.disk
    assert disk.num_written == len(disk.slots) == len({key for key, _ in disk.slots.values()})
    finish(engine)


def test_a_read_is_learned_and_foreseen_with_those_that_the_disk_brings_before_it() -> None:
    engine = overrun_with_reads_held(read_bytes=4 * 4096)
    come_back(engine, num_steps=1)
    reads = in_flight(engine, Kind.READ)
    lengths = [len(read) for read in reads]
    assert len(reads) > 2
    assert [read.num_ahead for read in reads] == [sum(lengths[:i]) for i in range(len(reads))]
    ahead = engine.connector.side.tier.below.reading
    assert ahead.num_blocks == sum(lengths)
    finish(engine)
    assert ahead.num_blocks == 0


def test_a_step_begins_as_many_writes_as_there_is_room_for() -> None:
    engine = on_disk(num_slots=200)
    disk = engine.connector.side.tier.below
    begin, disk.step = disk.step, lambda now: None
    for number in range(3):
        run_turn(engine, f"p{number}", 100, seed=number, program=f"p{number}")
    begin(engine.clock())
    assert len(in_flight(engine, Kind.WRITE)) == 3
    disk.step = begin
    finish(engine)


def test_of_a_slow_disk_no_more_is_asked_at_once_than_it_writes_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or most of it is late, paid from the budget for nothing, and asked again."""
    monkeypatch.setattr(disk, "MAX_WRITE_BYTES", 4 * 4096)
    engine = on_disk(num_blocks=400, num_slots=300, disk_slots=4000)
    pending, last_s = engine.worker.pending, [engine.clock()]

    def go_on() -> None:
        """A block in 0.8 s, one order after the other; all else at once."""
        writes = [each for each, copy in pending.items() if isinstance(copy.order, WriteOrder)]
        for each in set(pending) - set(writes):
            engine.worker.settle(each)
        if not writes:
            last_s[0] = engine.clock()
        elif engine.clock() - last_s[0] >= 0.8 * len(pending[writes[0]].order.slots):
            last_s[0] = engine.clock()
            engine.worker.settle(writes[0])

    engine.worker._settle_due = go_on
    for number in range(20):
        run_turn(engine, f"a{number}", 200, seed=number, program=f"p{number}", idle=False)
    engine.idle(60.0)
    num_late, num_written = total(engine, "writes", "cancelled"), engine.worker.disk.num_written
    engine.idle(30.0)
    assert total(engine, "writes", "cancelled") <= num_late + 3
    assert engine.worker.disk.num_written >= num_written + 20


def test_a_prefill_is_weighed_with_all_turns_that_it_delays() -> None:
    engine = overrun_with_reads_held()
    below, told = engine.connector.side.tier.below, []
    real = below.bring_up

    def bring_up(*args: Any, num_turns: int, **named: Any) -> Any:
        told.append(num_turns)
        return real(*args, num_turns=num_turns, **named)

    below.bring_up = bring_up
    engine.add("runs", list(range(50)), program="runs", max_tokens=64)
    engine.step()
    come_back(engine, num_steps=1)
    assert told == [1, 2]
    finish(engine)


def test_it_is_written_to_while_it_is_read() -> None:
    engine = overrun_with_reads_held(num_slots=60)
    come_back(engine, num_steps=2)
    assert in_flight(engine, Kind.READ)
    for number in range(2):
        run_turn(engine, f"new{number}", 100, seed=50 + number, program=f"n{number}", idle=False)
    for _ in range(5):
        engine.step()
    assert len(in_flight(engine, Kind.WRITE)) > 1
    finish(engine)
