"""A worker with a disk: whatever the disk does, each order ends once and DRAM stays."""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.messages import (
    LoadOrder,
    OnDisk,
    ReadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
    WriteOrder,
)
from continuum_connector.worker import disk as module
from continuum_connector.worker.abi import CORRUPT, EIO, ENOSPC, MISSING, UNTRIED, Region
from continuum_connector.worker.disk import (
    HUNG_LOOKS,
    HUNG_S,
    MAX_FOUND,
    DiskPlace,
    DiskShape,
    Namespace,
    WorkerDisk,
    disk_shape,
)
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.worker import ContinuumWorker
from tests.fakes import BLOCK_BYTES, FakeClock, poll
from tests.unit.fake_disk import IDLE, EngineWithDisk, FakeDiskFile

LAYOUT = Layout((Region(4096, 4096, 0, 4000),), 100, 4096, "cpu", 0)
MIB = 2**20
RANK = 3


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def write(transfer_id: int, disk_slot: int = 0) -> WriteOrder:
    return WriteOrder(transfer_id, ids(4, 5), ids(disk_slot), (b"key",), (0,))


def read(transfer_id: int, disk_slot: int = 0) -> ReadOrder:
    return ReadOrder(transfer_id, ids(-1, 5), ids(disk_slot), (b"key",))


class Rig:
    """A worker with a disk in a folder of its own, and what it reported."""

    def __init__(self, path: Path, is_open: bool = True, **keys: object) -> None:
        self.config = ContinuumConfig(
            dram_bytes=64 * 4096,
            disk_path=str(path / "disk"),
            **{"disk_bytes": 3 * MIB, **keys},  # type: ignore[arg-type]
        )
        self.engine = EngineWithDisk(slot_bytes=4096, num_ready=64)
        self.clock = FakeClock()
        self.report = WorkerReport()
        self.asked: list[Layout] = []
        self.disk = WorkerDisk(self.config, DiskPlace(1, RANK, 2), self._prove, self.clock)
        self.worker = ContinuumWorker(
            lambda _layout, _n: self.engine, self.config, rank=RANK, clock=self.clock
        )
        with patch.multiple(module, SLOT_BYTES=8192, DRAM_SHARE=1):
            self.worker.register(LAYOUT, self.disk)
        if is_open:
            self.open()

    def _prove(self, layout: Layout, _is_over: object) -> Namespace:
        self.asked.append(layout)
        return Namespace(b"n" * 32, '{"model": "tiny"}')

    def open(self) -> None:
        """Let the open end, and the worker see it."""
        self.engine.gate.set()
        self.join()
        self.tell()

    def join(self) -> None:
        thread = self.disk._thread
        assert thread is not None
        thread.join()

    @property
    def file(self) -> FakeDiskFile:
        assert self.engine.disk is not None
        return self.engine.disk

    def step(self, **plan: object) -> None:
        self.worker.begin(StepPlan(**plan))  # type: ignore[arg-type]
        self.worker.submit_stores()
        self.tell()

    def tell(self) -> None:
        poll(self.worker)
        if report := self.worker.take_report():
            assert not report.outcomes.keys() & self.report.outcomes.keys(), "settled twice"
            self.report.merge(report)

    def reasons(self, transfer_id: int) -> tuple[str, ...]:
        return self.report.outcomes[transfer_id].reasons

    def dram_serves(self) -> None:
        self.step(stores=(StoreOrder(900, ids(1), ids(1)),))
        self.engine.settle_all()
        self.tell()
        assert self.report.outcomes[900].num_done == 1
        assert not self.report.tier_down


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# --- the open -------------------------------------------------------------------------------
def test_a_disk_is_opened_behind_and_dram_serves_meanwhile(tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.dram_serves()
    rig.step(writes=(write(1),), reads=(read(2),))
    assert rig.reasons(1) == rig.reasons(2) == ("no_tier",)
    assert rig.report.disk_slots == {}
    rig.open()
    assert rig.report.disk_slots == {RANK: (3 * MIB // 2 - MIB) // (4096 + 8192)}
    assert rig.file.path == str(tmp_path / "disk" / f"dp1-rank{RANK}.slab")
    tuning = rig.file.tuning
    assert (tuning.slot_blocks, tuning.num_threads) == (2, 8)
    assert (tuning.namespace, tuning.facts) == (b"n" * 32, '{"model": "tiny"}')
    assert rig.asked == [LAYOUT]
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    rig.step(writes=(write(3),), reads=(read(4, 1),))
    assert rig.file.log == [("read", 4), ("write", 3)]


def test_a_disk_that_cannot_be_opened_is_no_tier_in_a_sentence_and_dram_stays(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.engine.refusal = "no room for 8 slots: No space left on device."
    rig.open()
    rig.tell()
    assert rig.report.disk_down == (
        "no room for 8 slots: No space left on device; what leaves DRAM is computed again until "
        "the server is restarted"
    )
    assert rig.report.disk_slots == {}
    rig.step(writes=(write(1),))
    assert rig.reasons(1) == ("no_tier",)
    rig.dram_serves()


def test_whatever_goes_wrong_in_the_open_is_no_tier(tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.engine.bug = TypeError("a bug")
    rig.open()
    assert "was not opened: TypeError" in rig.report.disk_down
    rig.dram_serves()


def test_disk_bytes_for_less_than_a_slot_are_no_tier(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_bytes=2 * MIB)
    assert "disk_bytes = 2097152 over 2 rank(s) holds no slot (8192 bytes each" in (
        rig.report.disk_down
    )
    rig.dram_serves()


def _no_thread(_self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_there_is_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        rig = Rig(tmp_path, is_open=False)
    rig.tell()
    assert "the system has no thread to open" in rig.report.disk_down
    rig.worker.shutdown()
    assert rig.engine.closed


def test_without_disk_path_there_is_no_thread_and_what_is_ordered_fails_all_the_same() -> None:
    before = set(threading.enumerate())
    engine = EngineWithDisk(slot_bytes=4096, num_ready=64)
    worker = ContinuumWorker(lambda _l, _n: engine, ContinuumConfig(dram_bytes=64 * 4096))
    worker.register(LAYOUT)
    assert set(threading.enumerate()) <= before
    worker.begin(StepPlan(reads=(read(1),), resets_disk=True))
    poll(worker)
    report = worker.take_report()
    assert report is not None
    assert report.outcomes == {1: TransferOutcome(num_failed=1, reasons=("no_tier",))}


def test_the_shape_of_a_file_fills_what_a_rank_may_have_and_not_more() -> None:
    config = ContinuumConfig(dram_bytes=2**40, disk_bytes=100 * MIB)
    assert disk_shape(config, 1, 2 * MIB) == DiskShape(49, 1)
    assert disk_shape(config, 2, 2 * MIB) == DiskShape(24, 1)
    assert disk_shape(config, 1, 512 * 1024) == DiskShape(49, 4)
    assert disk_shape(config, 1, 3 * MIB) == DiskShape(32, 1)
    assert disk_shape(config, 99, 3 * MIB).num_slots == 0


@pytest.mark.parametrize(
    ("dram", "num_ranks", "blocks"), [(18 * MIB, 1, 1), (96 * MIB, 1, 6), (96 * MIB, 2, 3)]
)
def test_a_disk_slot_is_a_small_part_of_dram(dram: int, num_ranks: int, blocks: int) -> None:
    config = ContinuumConfig(dram_bytes=dram, disk_bytes=100 * MIB)
    assert disk_shape(config, num_ranks, 256 * 1024).slot_blocks == blocks
    config = ContinuumConfig(dram_bytes=2**36, disk_bytes=100 * MIB)
    assert disk_shape(config, num_ranks, 256 * 1024).slot_blocks == 8, "2 MiB"


# --- a step ---------------------------------------------------------------------------------
def test_a_plan_is_carried_out_in_its_order(rig: Rig) -> None:
    rig.step(reads=(read(1),))
    rig.engine.log.clear()
    rig.file.log.clear()
    both: list[object] = []
    rig.file.log = both  # type: ignore[assignment]
    rig.engine.log = both  # type: ignore[assignment]
    rig.engine.cancelled = both  # type: ignore[assignment]
    rig.step(
        cancels=(1,),
        resets_disk=True,
        loads=(LoadOrder(2, "a", ids(7), ids(7)),),
        reads=(read(3, 1),),
        stores=(StoreOrder(4, ids(8), ids(8)),),
        writes=(write(5, 2),),
    )
    names = [getattr(each, "tag", each) for each in both]
    assert names == [1, ("reset", None), 2, ("read", 3), 4, ("write", 5)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EIO, "eio"), (ENOSPC, "enospc"), (CORRUPT, "corrupt"), (MISSING, "missing")],
)
def test_what_the_disk_says_of_a_failure_is_its_reason(rig: Rig, error: int, reason: str) -> None:
    rig.step(reads=(read(1),), writes=(write(2, 1),))
    rig.file.settle(1, error)
    rig.file.settle(2)
    rig.tell()
    assert rig.report.outcomes[1] == TransferOutcome(num_failed=1, reasons=(reason,))
    done = TransferOutcome(num_done=1, num_bytes=BLOCK_BYTES, seconds=0.25)
    assert rig.report.outcomes[2] == done
    assert rig.report.disk_down == ""


def test_each_slot_of_an_order_that_failed_has_its_own_end(rig: Rig) -> None:
    """Slots that were not begun, or failed for what is no fault of theirs, have none."""
    rig.step(reads=(read(1),), writes=(write(2, 1),))
    rig.file.settle(1, EIO, (0, EIO, 0, CORRUPT, MISSING, UNTRIED))
    rig.file.settle(2, ENOSPC, (0, ENOSPC, UNTRIED))
    rig.tell()
    both = rig.report.outcomes[1], rig.report.outcomes[2]
    assert [each.reasons for each in both] == [("eio",), ("enospc",)]
    assert [each.copied for each in both] == [{0, 2}, {0}]
    assert {why: set(places) for why, places in both[0].bad.items()} == {
        "eio": {1},
        "corrupt": {3},
        "missing": {4},
    }
    assert not any(both[1].bad.values())


def test_after_a_sleep_that_gave_dram_back_what_a_failed_read_brought_can_be_loaded(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, sleep_dram="release")
    rig.worker.fall_asleep()
    rig.worker.wake_up(LAYOUT)
    rig.engine.num_ready, rig.engine.is_growing = 64, False
    rig.tell()
    both = ReadOrder(1, ids(4, -1, 6, 7), ids(0, 1), (b"key", b"yek"))
    rig.step(epoch=1, reads=(both,))
    rig.file.settle(1, CORRUPT, (0, CORRUPT))
    rig.tell()
    rig.step(epoch=1, loads=(LoadOrder(2, "a", ids(1), ids(4)), LoadOrder(3, "b", ids(2), ids(6))))
    assert rig.reasons(1) == ("corrupt",)
    assert 2 not in rig.report.outcomes  # under way
    assert rig.reasons(3) == ("stale",)


def test_an_order_that_the_disk_refuses_fails_as_refused(rig: Rig) -> None:
    rig.file.refuses = True
    rig.step(reads=(read(1),))
    assert rig.reasons(1) == ("refused",)
    assert rig.file.in_flight == set()


def test_an_order_that_is_cancelled_in_its_own_plan_never_reaches_the_disk(rig: Rig) -> None:
    rig.step(reads=(read(1),), writes=(write(2),), cancels=(1, 2))
    assert rig.reasons(1) == rig.reasons(2) == ("cancelled",)
    assert rig.file.log == []


def test_what_fails_on_the_disk_is_no_failed_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("continuum_connector.worker.tier.logger.warning", told.append)
    rig.step(reads=(read(1),))
    rig.file.settle(1, EIO)
    rig.tell()
    assert rig.reasons(1) == ("eio",)
    assert told == []


# --- a restart ------------------------------------------------------------------------------
def test_what_a_restart_finds_is_told_in_pieces(tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.engine.gate.set()
    rig.join()
    there = [OnDisk(n, n, 0, b"key %d" % n) for n in range(MAX_FOUND + 5)]
    rig.file.left = list(there)
    rig.tell()
    assert rig.report.found == {}  # first that there is a disk
    rig.tell()
    assert len(rig.report.found[RANK]) == MAX_FOUND
    assert rig.report.disk_scanned == set()
    rig.clock.advance(1.0)
    rig.tell()
    assert rig.report.found == {RANK: there}
    assert rig.report.disk_scanned == {RANK}


def test_a_reset_before_the_open_has_ended_makes_foreign_what_is_on_the_disk(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.step(resets_disk=True)
    rig.engine.gate.set()
    rig.join()
    rig.file.left = [OnDisk(0, 0, 0, b"old")]
    rig.tell()
    rig.tell()
    assert rig.file.log == [("reset", None)]
    assert rig.report.found == {}


# --- a disk that fails ----------------------------------------------------------------------
def test_a_disk_that_hangs_is_given_up_after_a_minute_and_keeps_what_it_has(rig: Rig) -> None:
    rig.step(reads=(read(1),))
    rig.file.now = replace(IDLE, oldest_op_s=HUNG_S - 1)
    rig.clock.advance(1.0)
    rig.tell()
    assert rig.report.disk_down == ""
    rig.file.now = replace(IDLE, oldest_op_s=HUNG_S)
    for _ in range(HUNG_LOOKS):
        assert rig.report.disk_down == ""
        rig.clock.advance(1.0)
        rig.tell()
    assert "has not answered for 60 s" in rig.report.disk_down
    assert "cannot end" in rig.report.disk_down
    assert 1 not in rig.report.outcomes  # it may still write to the slot
    assert not rig.file.closed
    rig.dram_serves()
    rig.file.settle(1, EIO)  # it thaws
    rig.tell()
    assert rig.reasons(1) == ("eio",)
    rig.join()
    assert rig.file.closed


def test_a_process_that_was_stopped_for_a_minute_does_not_blame_its_disk(rig: Rig) -> None:
    rig.step(reads=(read(1),))
    for _ in range(HUNG_LOOKS):  # each time it is stopped, and then the disk answers
        rig.file.now = replace(IDLE, oldest_op_s=HUNG_S + 10)
        rig.clock.advance(HUNG_S + 10)
        rig.tell()
        rig.file.now = IDLE
        rig.clock.advance(1.0)
        rig.tell()
    assert rig.report.disk_down == ""
    rig.file.settle(1)
    rig.tell()
    assert rig.report.outcomes[1].num_done == 1


def test_a_disk_that_says_itself_that_it_has_ended_is_given_up(rig: Rig) -> None:
    rig.file.now = replace(IDLE, is_scanned=True)
    rig.tell()
    assert rig.worker.is_idle
    rig.file.now = replace(IDLE, error=EIO, why="the superblock could not be written.")
    rig.clock.advance(1.0)
    rig.tell()
    assert rig.report.disk_down.startswith("the superblock could not be written; what leaves")


def test_with_dram_goes_its_disk(rig: Rig) -> None:
    rig.step(reads=(read(1),))
    rig.worker.disable("the driver failed")
    rig.tell()
    assert rig.report.tier_down == "the driver failed"
    assert rig.report.disk_down.startswith("there is no DRAM tier any more; ")
    assert not rig.engine.closed
    rig.file.settle(1)
    rig.tell()
    rig.worker.shutdown()
    assert rig.file.closed
    assert rig.engine.closed
    assert not rig.engine.was_closed_first


# --- the end --------------------------------------------------------------------------------
def test_a_file_that_waits_to_be_closed_is_not_reset(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be closing it. Nothing more is written, so a restart finds what is right
    for the weights that it was computed with."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        rig.disk.give_up("gone", rig.report)
    rig.step(resets_disk=True)
    assert ("reset", None) not in rig.file.log


def test_a_disk_that_refuses_a_reset_is_given_up_and_dram_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written after that would be of other weights than a restart loads."""

    def refuse() -> None:
        raise TransferError("the system gives no random number.")

    monkeypatch.setattr(rig.file, "reset", refuse)
    rig.worker.new_weights("update")
    rig.tell()
    assert "the system gives no random number; what leaves DRAM" in rig.report.disk_down
    assert not rig.report.tier_down
    rig.step(writes=(write(1),), epoch=1)
    assert rig.report.outcomes[1].reasons == ("no_tier",)


def test_a_shutdown_closes_the_disk_before_the_engine(rig: Rig) -> None:
    rig.step(reads=(read(1),), writes=(write(2, 1),))
    rig.worker.shutdown()
    rig.worker.shutdown()
    assert rig.engine.cancelled == [1, 2]
    assert (rig.file.closed, rig.engine.closed) == (True, True)
    assert not rig.engine.was_closed_first
    rig.tell()
    assert rig.reasons(1) == rig.reasons(2) == ("closed",)


def test_a_disk_that_does_not_answer_is_left_behind_and_the_log_says_what_that_means(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: told.append(text % parts))
    rig.file.answers_close = False
    rig.worker.shutdown()
    assert rig.engine.closed
    assert told == [
        f"the disk at {rig.disk.path} does not answer; what it still has to do is left "
        "behind, and this process ends, and frees its GPU, only once it answers"
    ]


def test_a_disk_that_hangs_in_its_open_keeps_the_engine_from_being_closed_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(module, "_END_S", 0.01)
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: told.append(text % parts))
    rig = Rig(tmp_path, is_open=False)
    rig.worker.shutdown()
    assert not rig.engine.closed
    assert told == [f"the disk at {rig.disk.path} hangs, so this process cannot end"]
    rig.engine.gate.set()
    rig.join()


def test_a_shutdown_that_finds_a_file_just_opened_closes_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_open=False)
    rig.engine.gate.set()
    rig.join()
    rig.worker.shutdown()
    assert (rig.file.closed, rig.engine.closed) == (True, True)


# --- what a restart must know ---------------------------------------------------------------
def join_watch(rig: Rig) -> None:
    watch = rig.disk._watch
    assert watch is not None
    watch._thread.join(60)
    assert not watch._thread.is_alive()


def test_a_restart_is_told_what_of_the_write_budget_is_spent(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.report.disk_spent == {}
    for plan in ({"disk_spent": 700}, {}, {"writes": (write(1),), "disk_spent": 900}):
        rig.step(**plan)
    rig.worker.shutdown()
    join_watch(rig)
    again = Rig(tmp_path)
    assert again.report.disk_spent[RANK].num_bytes == 900
    assert 0.0 <= again.report.disk_spent[RANK].age_s < 3600.0
    again.worker.shutdown()


@pytest.mark.parametrize("end", ["shutdown", "give_up", "shutdown while it opens"])
def test_nothing_watches_over_a_disk_that_is_not_used(end: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, is_open=end != "shutdown while it opens")
    if end == "give_up":
        rig.disk.give_up("gone", rig.report)
    else:
        rig.engine.gate.set()
        rig.worker.shutdown()
    join_watch(rig)


# --- its folder -----------------------------------------------------------------------------
def test_a_folder_that_others_could_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "ours"
    module.make_folder(str(ours))
    module.make_folder(str(ours))
    assert ours.stat().st_mode & 0o777 == 0o700

    def refusal(path: Path) -> str:
        with pytest.raises(TransferError) as caught:
            module.make_folder(str(path))
        assert "name a folder in it that is not there yet" in str(caught.value)
        return str(caught.value)

    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(ours)
    file.touch()
    assert "is a symbolic link, which may be pointed elsewhere, so" in refusal(link)
    assert "is no folder, so" in refusal(file)
    ours.chmod(0o770)
    assert "may be written by others (mode 770), so" in refusal(ours)
    ours.chmod(0o755)
    module.make_folder(str(ours))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "not to 12345 who runs the server, so" in refusal(ours)
    with pytest.raises(TransferError, match="see that its drive is mounted"):
        module.make_folder(str(tmp_path / "not" / "mounted"))


@pytest.mark.min_left
def test_a_file_that_would_fill_its_file_system_is_refused_unless_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.statvfs(tmp_path)
    path = tmp_path / "dp0-rank0.slab"
    kib, total, free = 1024, 10_000, 2_000

    def statvfs(_path: Path) -> os.statvfs_result:
        return os.statvfs_result((kib, kib, total, free, free, *before[5:]))

    monkeypatch.setattr(os, "statvfs", statvfs)
    module.check_room(path, 1500 * kib)
    with pytest.raises(TransferError, match=r"would leave less than 5% of its file system, which"):
        module.check_room(path, 1501 * kib)
    path.write_bytes(bytes(1000 * kib))
    module.check_room(path, 2500 * kib)
    free = 0  # others have filled the rest since
    module.check_room(path, 1000 * kib)
    with pytest.raises(TransferError, match=r"has 10240000 bytes and 1024000 free"):
        module.check_room(path, 1004 * kib)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    with pytest.raises(TransferError, match="is no file, so nothing can be kept in it; remove it"):
        module.check_room(path, kib)


def test_a_file_that_others_could_write_is_refused(tmp_path: Path) -> None:
    """As one that lies there since the folder was everybody's."""
    path = tmp_path / "dp0-rank0.slab"
    path.touch(0o600)
    module.check_room(path, 1)
    path.chmod(0o620)
    with pytest.raises(TransferError, match="may be another user's to write; remove it"):
        module.check_room(path, 1)


def test_one_rank_at_a_time_opens_its_file(tmp_path: Path) -> None:
    is_over = threading.Event()
    with module.only_one(str(tmp_path), is_over):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
        is_over.set()
        with (
            pytest.raises(TransferError, match="ended before its disk was open"),
            module.only_one(str(tmp_path), is_over),
        ):
            pass
    with module.only_one(str(tmp_path), is_over):
        pass


def test_a_fork_that_lives_on_keeps_no_rank_from_its_turn(tmp_path: Path) -> None:
    """It has the lock's descriptor as well, and keeps it for as long as it lives."""
    goes_on, ends = os.pipe()
    with module.only_one(str(tmp_path), threading.Event()):
        if (child := os.fork()) == 0:
            os.close(ends)
            os.read(goes_on, 1)
            os._exit(0)
    try:
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(goes_on)
