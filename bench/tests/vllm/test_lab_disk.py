"""A disk in the lab: who copies over it when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.sim.arms import ARMS
from bench.sim.bus import Bus, Disk
from bench.sim.hardware import GB
from bench.sim.lab import Lab
from bench.sim.workers import OurWorker
from bench.tests.vllm.lab import small_machine, small_workload
from continuum_connector.messages import ReadOrder, StepPlan, WorkerReport, WriteOrder


def worker() -> OurWorker:
    """Blocks of 1 GB, a disk that reads 8 a second and writes 4."""
    return OurWorker(Bus(1e12), GB, 16, Disk(8 * GB, 4 * GB, 0.0), num_disk_slots=100)


def step(**plan: Any) -> Any:
    return SimpleNamespace(kv_connector_metadata=SimpleNamespace(plan=StepPlan(**plan)))


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def read(transfer_id: int, *slots: int) -> ReadOrder:
    return ReadOrder(transfer_id, ids(*slots), ids(*range(len(slots))), (b"k",) * len(slots))


def write(transfer_id: int, *slots: int) -> WriteOrder:
    keys = (b"k",) * len(slots)
    return WriteOrder(transfer_id, ids(*slots), ids(*range(len(slots))), keys, (0,) * len(slots))


def reported(half: OurWorker, now: float) -> WorkerReport:
    found = half.output(now).get("kv_connector_worker_meta")
    return found.report if found else WorkerReport()


def test_the_first_report_says_how_many_slots_the_disk_has() -> None:
    first = reported(worker(), 0.0)
    assert (first.ready_slots, first.disk_slots) == ({0: 16}, {0: 100})


def test_a_read_travels_whole_before_a_write_that_came_first() -> None:
    """The disk slot whose block DRAM has, -1, is read all the same."""
    half = worker()
    reported(half, 0.0)
    half.start(step(writes=(write(1, 0, 1),)), 0.0, 0.0)
    half.start(step(reads=(read(2, *[4] * 7, -1),)), 0.25, 0.25)
    assert half.next_done() == pytest.approx(1.25)
    assert list(reported(half, 1.2).outcomes) == []
    done = reported(half, 1.3).outcomes
    assert list(done) == [2]
    assert (done[2].num_bytes, done[2].seconds) == (8 * GB, pytest.approx(1.0))
    assert half.next_done() == pytest.approx(1.5)
    assert list(reported(half, 1.6).outcomes) == [1]


def test_a_read_that_has_not_begun_is_taken_back_and_one_that_has_goes_on() -> None:
    half = worker()
    reported(half, 0.0)
    half.start(step(reads=(read(1, *[0] * 8), read(2, *[1] * 8))), 0.0, 0.0)
    half.start(step(cancels=(1, 2)), 0.5, 0.5)
    told = reported(half, 0.5).outcomes
    assert {key: each.reasons for key, each in told.items()} == {2: ("cancelled",)}
    assert reported(half, 1.0).outcomes[1].num_done == 1
    assert not half._pending


def test_an_arm_that_is_nothing_without_a_disk_says_so() -> None:
    with pytest.raises(ValueError, match="needs a machine with a disk"):
        Lab(small_machine(), ARMS["adaptive-no-disk"], small_workload())
