"""A worker's disk over the native library: real files, found again by the next life, or refused."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.messages import OnDisk, ReadOrder, StepPlan, WorkerReport, WriteOrder
from continuum_connector.vllm.facts import Checkpoint, prover
from continuum_connector.worker import disk as module
from continuum_connector.worker.abi import Region
from continuum_connector.worker.disk import DiskPlace, Namespace, Prove, WorkerDisk
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeEngine
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import FakeClock, mount_tmpfs, poll

NUM_BLOCKS, BLOCK = 16, 4096
KEYS = (b"a" * 36, b"b" * 36)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Life:
    """A worker from its start to its end, with a disk of four slots of two blocks and more."""

    def __init__(
        self,
        folder: Path,
        namespace: bytes = b"n" * 32,
        prove: Prove | None = None,
        slot_blocks: int = 2,
        sleep_dram: str = "keep",
    ) -> None:
        self.vram = np.zeros(NUM_BLOCKS * BLOCK, np.uint8)
        region = Region(self.vram.ctypes.data, BLOCK, 0, BLOCK)
        self.layout = Layout((region,), NUM_BLOCKS, BLOCK, "cpu", 0)
        self.epoch = 0
        config = ContinuumConfig(
            dram_bytes=NUM_BLOCKS * BLOCK,
            disk_path=str(folder),
            disk_bytes=2 * 2**20,
            sleep_dram=sleep_dram,
        )
        self.clock = FakeClock()
        named = Namespace(namespace, "{}")
        prove = prove or (lambda *_: named)
        self.disk = WorkerDisk(config, DiskPlace(0, 0, 1), prove, self.clock)
        self.worker = ContinuumWorker(
            lambda each, n: NativeEngine("sim", each, n), config, clock=self.clock
        )
        with patch.multiple(module, SLOT_BYTES=slot_blocks * BLOCK, DRAM_SHARE=1):
            self.worker.register(self.layout, self.disk)
        self.report = WorkerReport()
        assert self.disk._thread is not None
        self.disk._thread.join()
        self.hear()

    def hear(self) -> None:
        self.clock.advance(1.0)
        poll(self.worker)
        if report := self.worker.take_report():
            self.report.merge(report)

    def found(self) -> list[OnDisk]:
        while not self.disk._is_scanned:
            assert not self.report.disk_down
            self.hear()
        return sorted(self.report.found.get(0, []), key=lambda each: each.slot)

    def do(self, *orders: ReadOrder | WriteOrder) -> list[tuple[str, ...]]:
        """How each went: no reason, or why it failed."""
        reads = tuple(each for each in orders if isinstance(each, ReadOrder))
        writes = tuple(each for each in orders if isinstance(each, WriteOrder))
        self.worker.begin(StepPlan(reads=reads, writes=writes, epoch=self.epoch))
        self.worker.submit_stores()
        while not all(each.transfer_id in self.report.outcomes for each in orders):
            self.hear()
        return [self.report.outcomes[each.transfer_id].reasons for each in orders]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def write(transfer_id: int) -> WriteOrder:
    return WriteOrder(transfer_id, ids(0, 1, 2, 3), ids(2, 0), KEYS, (0, 1))


def test_the_next_life_finds_what_was_written_and_another_namespace_does_not(
    folder: Path, ends: ExitStack
) -> None:
    first = Life(folder)
    assert first.found() == []
    assert first.do(write(1)) == [()]
    first.worker.shutdown()
    assert (folder / "dp0-rank0.slab").stat().st_mode & 0o777 == 0o600

    second = Life(folder)
    assert [(each.slot, each.depth, each.key) for each in second.found()] == [
        (0, 1, KEYS[1]),
        (2, 0, KEYS[0]),
    ]
    right = ReadOrder(2, ids(4, -1), ids(0), KEYS[1:])
    wrong = ReadOrder(3, ids(6, 7), ids(2), KEYS[1:])
    assert second.do(right, wrong) == [(), ("missing",)]
    second.worker.shutdown()

    third = Life(folder, b"o" * 32)
    ends.callback(third.worker.shutdown)
    assert third.found() == []
    assert third.do(ReadOrder(2, ids(4, 5), ids(0), KEYS[1:])) == [("missing",)]


def test_a_disk_that_is_begun_anew_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda text, *parts: told.append(text % parts))

    def live(facts: str, reset: bool = False, **keys: Any) -> str:
        named = Namespace(hashlib.sha256(facts.encode()).digest(), facts)
        life = Life(folder, prove=lambda *_: named, **keys)
        if reset:
            life.disk.reset(life.report)
        life.worker.shutdown()
        return told.pop().rpartition("; ")[2].rstrip(")")

    one, other = '{"dtype": "half", "vllm": "1"}', '{"tensor": 2, "dtype": "half", "vllm": "2"}'
    assert live(one) == "begun anew for the first time"
    assert live(one) == "looking for what was kept"
    assert live(other) == "begun anew because of other tensor, vllm"
    assert live(one) == "begun anew because of other tensor, vllm"
    same = "begun anew because its slots had another size, or the last server was reset"
    assert live(one, slot_blocks=4) == same
    assert live("[]") == live(one) == "begun anew because what is on it is of another server"
    assert live(one, reset=True) == "looking for what was kept"
    assert live(one) == same


def test_a_slot_that_another_key_is_in_fails_alone(folder: Path, ends: ExitStack) -> None:
    life = Life(folder)
    ends.callback(life.worker.shutdown)
    assert life.do(write(1)) == [()]
    wrong = ReadOrder(2, ids(4, 5, 6, 7), ids(2, 0), (KEYS[0], KEYS[0]))
    assert life.do(wrong) == [("missing",)]
    outcome = life.report.outcomes[2]
    assert (outcome.copied, outcome.bad["missing"], outcome.bad["eio"]) == ({0}, {1}, set())


def test_who_has_read_the_weights_leaves_the_disk_threads_as_nice_as_they_make_themselves(
    folder: Path, tmp_path: Path, ends: ExitStack
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    read_from = Checkpoint(str(tmp_path), time.time() + 60.0)
    life = Life(folder, prove=prover(dict, lambda: read_from, str(folder)))
    ends.callback(life.worker.shutdown)
    assert life.found() == []
    assert life.do(write(1)) == [()]  # so one of the threads has begun; another may be about to
    nice = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the kernel lists a thread for a moment after it was joined
            if (task / "comm").read_text() == "ckv-disk\n":
                nice.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert {min(19, own + 5)} <= nice <= {own, min(19, own + 5)}


def test_a_second_worker_on_the_path_has_no_disk_and_says_why(
    folder: Path, ends: ExitStack
) -> None:
    first, second = Life(folder), Life(folder)
    ends.callback(second.worker.shutdown)
    ends.callback(first.worker.shutdown)
    why = second.report.disk_down
    assert "dp0-rank0.slab is in use by another process; end that one, or give this" in why
    assert "this server a disk_path of its own; what leaves" in why
    assert second.do(write(1)) == [("no_tier",)]
    assert first.do(write(1)) == [()]


def test_a_reset_is_kept_over_a_restart(folder: Path, ends: ExitStack) -> None:
    first = Life(folder)
    assert first.do(write(1)) == [()]
    first.worker.begin(StepPlan(resets_disk=True))
    first.worker.submit_stores()
    first.worker.shutdown()
    second = Life(folder)
    ends.callback(second.worker.shutdown)
    assert second.found() == []


@pytest.mark.min_left
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("size=8m", "ro"), "Read-only file system"),
        (("size=1m",), "would leave less than 5% of its file system"),
    ],
)
def test_a_file_system_that_is_read_only_or_too_small_is_no_disk_and_says_why(
    folder: Path,
    ends: ExitStack,
    options: tuple[str, ...],
    said: str,
) -> None:
    mount_tmpfs(folder, ends, *options)
    life = Life(folder)
    ends.callback(life.worker.shutdown)
    assert said in life.report.disk_down
    assert not life.report.tier_down
