"""ContinuumWorker when the weights change under it, and when its KV cache is taken away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import StepPlan, WorkerReport
from continuum_connector.worker.abi import Region
from tests.fakes import FakeCopyEngine
from tests.unit.test_worker import LAYOUT, Rig, load, store

RELEASE = ContinuumConfig(dram_bytes=64_000, sleep_dram="release")
MOVED = replace(LAYOUT, regions=(Region(9_000_000, 1000, 0, 1000),))


def step(rig: Rig, **orders: object) -> None:
    """One step with these orders; what is not held has settled, and is told."""
    rig.worker.begin(StepPlan(**orders))  # type: ignore[arg-type]
    rig.worker.submit_stores()
    rig.tell()


def reasons(rig: Rig) -> dict[int, tuple[str, ...]]:
    return {number: outcome.reasons for number, outcome in rig.outcomes.items()}


def report_of(rig: Rig) -> WorkerReport:
    report = rig.worker.take_report()
    assert report is not None
    return report


# Other weights.


def test_what_was_stored_before_the_weights_changed_is_not_loaded_after() -> None:
    rig = Rig(hold=False)
    step(rig, epoch=3, stores=(store(1, 5),))
    rig.worker.new_weights("reload_weights")
    report = report_of(rig)
    assert (report.new_weights, report.changed_in) == ("reload_weights", 3)
    step(rig, epoch=3, loads=(load(2, "a", 5),))
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {5})
    assert reasons(rig) == {1: (), 2: ("stale",)}
    assert rig.submitted() == [1]
    assert rig.tier_down == []


def test_a_load_under_way_while_the_weights_change_brings_nothing() -> None:
    rig = Rig()
    step(rig, epoch=1, loads=(load(1, "a", 4),))
    rig.worker.new_weights("update_weights")
    rig.engine.settle_all()
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {4})
    assert reasons(rig) == {1: ("stale",)}


def test_the_next_epoch_stores_and_loads() -> None:
    rig = Rig(hold=False)
    step(rig, epoch=1, stores=(store(1, 5),))
    rig.worker.new_weights("reload_weights")
    step(rig, epoch=1, stores=(store(2, 6),))
    step(rig, epoch=2, stores=(store(3, 7),))
    step(rig, epoch=2, loads=(load(4, "a", 7),))
    assert reasons(rig) == {1: (), 2: ("stale",), 3: (), 4: ()}
    assert not rig.failed


def test_leftovers_of_a_step_before_are_as_old_as_that_step() -> None:
    rig = Rig(hold=False)
    rig.worker.begin(StepPlan(epoch=1, stores=(store(1, 5),)))
    rig.worker.new_weights("reload_weights")
    rig.worker.begin(StepPlan(epoch=2))
    rig.tell()
    assert reasons(rig) == {1: ("stale",)}


def test_new_weights_are_told_once_and_without_a_tier_too() -> None:
    rig = Rig(config=ContinuumConfig())
    rig.worker.new_weights("load_weights")
    rig.worker.new_weights("load_weights")
    assert report_of(rig).new_weights == "load_weights"
    assert rig.worker.take_report() is None


# Sleep.


def test_copies_under_way_end_before_the_kv_cache_is_taken_away() -> None:
    rig = Rig()
    step(rig, stores=(store(1, 5),), loads=(load(2, "a", 6),))
    rig.worker.fall_asleep()
    assert rig.engine.in_flight == {}
    assert sorted(rig.engine.cancelled) == [1, 2]
    rig.tell()
    assert reasons(rig) == {1: ("cancelled",), 2: ("cancelled",)}
    assert rig.failed == {"a"}


def test_a_load_that_ended_as_the_kv_cache_went_has_brought_nothing() -> None:
    """vLLM has not been told of it, and where it lay is nothing any more."""
    rig = Rig()
    step(rig, loads=(load(1, "a", 6),))
    rig.engine.settle_all()
    rig.worker.fall_asleep()
    rig.worker.wake_up(MOVED)
    rig.tell()
    assert (rig.finished, rig.failed, rig.bad) == ({"a": 1}, {"a"}, {6})
    assert reasons(rig) == {1: ("asleep",)}


def test_nothing_touches_the_kv_cache_while_it_is_away() -> None:
    rig = Rig()
    rig.worker.begin(StepPlan(stores=(store(1, 5),), loads=(load(2, "a", 6),)))
    rig.worker.fall_asleep()
    rig.worker.fall_asleep()
    step(rig, stores=(store(3, 7),), loads=(load(4, "b", 8),))
    assert rig.submitted() == []
    assert set(reasons(rig).values()) == {("asleep",)}
    assert rig.finished == {"a": 1, "b": 1}


def test_after_the_wake_blocks_lie_where_they_are_said_to() -> None:
    rig = Rig(hold=False)
    rig.worker.wake_up(MOVED)  # it does not sleep
    assert rig.engine.moved == []
    rig.worker.fall_asleep()
    rig.worker.wake_up(MOVED)
    rig.worker.wake_up(LAYOUT)
    assert rig.engine.moved == [MOVED]
    step(rig, stores=(store(1, 5),))
    assert reasons(rig) == {1: ()}


def test_a_driver_that_keeps_a_copy_keeps_the_kv_cache() -> None:
    rig = Rig()
    rig.engine.wait = lambda tag, timeout_s: False  # type: ignore[method-assign]
    step(rig, stores=(store(1, 5),))
    with pytest.raises(TransferError, match="must not be taken away"):
        rig.worker.fall_asleep()
    step(rig, stores=(store(2, 6),))
    rig.engine.settle_all()
    rig.tell()
    assert reasons(rig) == {1: ("cancelled",), 2: ()}


def test_dram_that_is_kept_has_its_slots_after_the_wake() -> None:
    rig = Rig(hold=False)
    step(rig, stores=(store(1, 5),))
    rig.worker.fall_asleep()
    rig.worker.wake_up(LAYOUT)
    assert not rig.engine.is_released
    step(rig, loads=(load(2, "a", 5),))
    assert reasons(rig) == {1: (), 2: ()}
    assert rig.ready_slots == [{0: 64}]  # as it was told at the start


def test_dram_that_is_released_grows_anew_and_its_content_is_of_the_past() -> None:
    rig = Rig(hold=False, config=RELEASE)
    step(rig, epoch=1, stores=(store(1, 5),))
    rig.worker.fall_asleep()
    report = report_of(rig)
    assert (report.new_weights, report.ready_slots) == ("sleep", {0: 0})
    assert rig.engine.is_released
    rig.worker.wake_up(LAYOUT)
    step(rig, epoch=1, loads=(load(2, "a", 5),))
    rig.engine.num_ready = 6
    step(rig, epoch=2, stores=(store(3, 6),))
    step(rig, epoch=2, stores=(store(4, 5),))
    assert reasons(rig) == {1: (), 2: ("stale",), 3: ("asleep",), 4: ()}
    rig.engine.num_ready, rig.engine.is_growing = 64, False
    rig.tell()
    step(rig, epoch=2, stores=(store(5, 63),))
    assert reasons(rig)[5] == ()
    assert rig.ready_slots[1:] == [{0: 0}, {0: 6}, {0: 64}]
    assert rig.tier_down == []


def test_an_epoch_from_before_dram_was_released_finds_nothing_in_it() -> None:
    """A client may go back to an epoch that it named; its number is a new one then."""
    rig = Rig(hold=False, config=RELEASE)
    step(rig, epoch=1, stores=(store(1, 5, 6),))
    rig.worker.fall_asleep()
    rig.worker.wake_up(LAYOUT)
    rig.engine.num_ready, rig.engine.is_growing = 64, False
    rig.tell()
    step(rig, epoch=7, stores=(store(2, 6),))
    step(rig, epoch=7, loads=(load(3, "a", 5),))
    step(rig, epoch=7, loads=(load(4, "b", 5, 6),))
    step(rig, epoch=7, loads=(load(5, "c", 6),))
    assert reasons(rig) == {1: (), 2: (), 3: ("stale",), 4: ("stale",), 5: ()}
    assert rig.failed == {"a", "b"}


def test_dram_that_others_have_taken_meanwhile_is_waited_for_behind() -> None:
    rig = Rig(hold=False, config=RELEASE)
    rig.worker.fall_asleep()
    rig.worker.wake_up(LAYOUT)
    rig.engine.is_growing, rig.engine.why = False, "the machine has 1 GiB available"
    rig.tell()
    rig.engine.num_ready, rig.engine.why = 64, ""
    for _ in range(256):
        rig.tell()
    assert rig.tier_down == []
    assert rig.ready_slots[-1] == {0: 64}


def test_dram_that_cannot_be_given_back_is_kept() -> None:
    class Busy(FakeCopyEngine):
        def release(self) -> None:
            raise TransferError("the host pool keeps its pages: a disk hangs")

    class BusyRig(Rig):
        def make_engine(self) -> FakeCopyEngine:
            return Busy()

    rig = BusyRig(hold=False, config=RELEASE)
    step(rig, stores=(store(1, 5),))
    rig.worker.fall_asleep()
    rig.worker.wake_up(LAYOUT)
    step(rig, loads=(load(2, "a", 5),))
    assert reasons(rig) == {1: (), 2: ()}


def test_a_tier_that_went_down_sleeps_and_wakes_without_one() -> None:
    rig = Rig()
    rig.worker.disable("the pool is short")
    rig.worker.fall_asleep()
    rig.worker.wake_up(MOVED)
    step(rig, stores=(store(1, 5),))
    assert reasons(rig) == {1: ("no_tier",)}


def test_blocks_that_came_back_as_others_end_the_tier() -> None:
    rig = Rig()

    def refuse(layout: object, num_slots: int) -> None:
        raise TransferError("regions are not set: blocks that were moved must be what they were")

    rig.engine.set_regions = refuse  # type: ignore[method-assign]
    rig.worker.fall_asleep()
    rig.worker.wake_up(replace(LAYOUT, num_blocks=7))
    rig.tell()
    assert len(rig.tier_down) == 1
