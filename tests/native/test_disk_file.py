"""A file on a disk, from Python: what is written is read again, by this process and the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from continuum_connector.errors import TransferError
from continuum_connector.messages import BlockIds, OnDisk, ReadOrder, WriteOrder
from continuum_connector.worker.abi import (
    CORRUPT,
    EIO,
    MISSING,
    UNTRIED,
    Completion,
    Direction,
    DiskTuning,
    Region,
    Status,
)
from continuum_connector.worker.layout import Layout
from continuum_connector.worker.native import NativeDisk, NativeEngine
from tests.native import sim
from tests.native.conftest import LIMIT_S, Rig, ids

TUNING = DiskTuning(num_slots=8, slot_blocks=2, namespace=b"\7" * 32, facts='{"model": "tiny"}')


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 9


class Disk:
    """The rig's engine with a file of eight disk slots, two blocks each."""

    def __init__(self, rig: Rig, path: Path, tuning: DiskTuning = TUNING) -> None:
        self.rig = rig
        self.path = path
        self.file: NativeDisk = rig.engine.open_disk(str(path), tuning)
        self._tag = 1000

    def finish(self, tag: int) -> Completion:
        assert self.rig.engine.wait(tag, LIMIT_S)
        (completion,) = self.rig.engine.poll()
        return completion

    def write(self, slots: BlockIds, disk_slot: int, number: int, depth: int = 0) -> Completion:
        self._tag += 1
        self.file.submit(WriteOrder(self._tag, slots, ids(disk_slot), (key_of(number),), (depth,)))
        return self.finish(self._tag)

    def read(self, slots: BlockIds, disk_slot: int, number: int) -> Completion:
        self._tag += 1
        self.file.submit(ReadOrder(self._tag, slots, ids(disk_slot), (key_of(number),)))
        return self.finish(self._tag)

    def found(self) -> list[OnDisk]:
        """All that the scan finds."""
        found: list[OnDisk] = []
        while not self.file.state().is_scanned:
            found += self.file.scan(3)
        return sorted(found, key=lambda each: each.slot)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "dp0-rank0.slab"


@pytest.fixture
def disk(rig: Rig, path: Path) -> Iterator[Disk]:
    made = Disk(rig, path)
    yield made
    made.file.close(LIMIT_S)


def test_bytes_written_are_read_to_other_slots(disk: Disk) -> None:
    rig = disk.rig
    rig.finish(Direction.STORE, ids(0, 1, 2, 3), ids(0, 1, 2, 3), 1)
    written = disk.write(ids(0, 3), 5, 1)
    assert (written.status, written.num_bytes) == (Status.DONE, 4 * rig.PIECE)
    assert disk.read(ids(11, 10), 5, 1).status is Status.DONE
    assert np.array_equal(rig.slot(11), rig.vram[:, 0])
    assert np.array_equal(rig.slot(10), rig.vram[:, 3])


def test_a_block_that_is_not_wanted_leaves_every_slot_alone_but_is_summed(disk: Disk) -> None:
    rig = disk.rig
    rig.finish(Direction.STORE, ids(0, 1), ids(0, 1), 1)
    disk.write(ids(0, 1), 0, 1)
    before = rig.engine.pool.view().copy()
    assert disk.read(ids(-1, 9), 0, 1).status is Status.DONE
    assert np.array_equal(rig.slot(9), rig.vram[:, 1])
    rig.slot(9)[:] = 0
    assert np.array_equal(rig.engine.pool.view(), before)


def test_another_key_in_the_slot_is_missing(disk: Disk) -> None:
    disk.write(ids(0, 1), 0, 1)
    assert disk.read(ids(2, 3), 0, 2).error == MISSING
    assert disk.read(ids(2, 3), 1, 1).error == MISSING


def test_a_read_that_fails_says_which_slots_it_has_read(rig: Rig, path: Path) -> None:
    disk = Disk(rig, path, replace(TUNING, num_threads=1))
    rig.finish(Direction.STORE, ids(0, 1, 2, 3), ids(0, 1, 2, 3), 1)
    assert disk.write(ids(0, 1), 5, 1).disk_errors == disk.write(ids(2, 3), 6, 2).disk_errors == ()
    keys = tuple(key_of(each) for each in (1, 77, 2))
    disk.file.submit(ReadOrder(1, ids(10, 11, 12, 13, 14, 15), ids(5, 4, 6), keys))
    ended = disk.finish(1)
    assert (ended.status, ended.error) == (Status.FAILED, MISSING)
    assert ended.disk_errors == (0, MISSING, UNTRIED)
    assert np.array_equal(rig.slot(10), rig.vram[:, 0])
    disk.file.close(LIMIT_S)


def test_the_next_process_finds_what_was_written_with_its_order_and_depth(path: Path) -> None:
    first = Rig()
    disk = Disk(first, path)
    first.finish(Direction.STORE, ids(0, 1), ids(0, 1), 1)
    disk.write(ids(0, 1), 6, 2, depth=1)
    disk.write(ids(0, 1), 3, 1, depth=0)
    first.engine.close(LIMIT_S)
    second = Rig()
    again = Disk(second, path)
    assert again.file.state().was_kept
    found = again.found()
    assert [(each.slot, each.depth, each.key) for each in found] == [
        (3, 0, key_of(1)),
        (6, 1, key_of(2)),
    ]
    assert found[0].sequence > found[1].sequence, "the order of the writes"
    assert again.write(ids(2, 3), 0, 3).status is Status.DONE
    assert again.read(ids(4, 5), 3, 1).status is Status.DONE
    assert np.array_equal(second.slot(4), first.vram[:, 0])
    second.engine.close(LIMIT_S)


@pytest.mark.parametrize(
    "tuning", [replace(TUNING, namespace=b"\7" * 31 + b"\6"), replace(TUNING, slot_blocks=1)]
)
def test_a_file_of_another_namespace_or_shape_is_begun_anew(path: Path, tuning: DiskTuning) -> None:
    for opened in (TUNING, tuning, TUNING):
        rig = Rig()
        disk = Disk(rig, path, opened)
        assert not disk.file.state().was_kept
        assert disk.found() == []
        assert disk.read(ids(*range(opened.slot_blocks)), 0, 1).error == MISSING
        disk.write(ids(*range(opened.slot_blocks)), 0, 1)
        rig.engine.close(LIMIT_S)


def test_a_reset_makes_all_foreign_in_this_process_and_the_next(path: Path) -> None:
    rig = Rig()
    disk = Disk(rig, path)
    disk.write(ids(0, 1), 0, 1)
    disk.file.reset()
    while not disk.file.state().is_ready:
        pass
    assert disk.read(ids(2, 3), 0, 1).error == MISSING
    assert disk.write(ids(0, 1), 1, 2).status is Status.DONE
    rig.engine.close(LIMIT_S)
    again = Rig()
    after = Disk(again, path)
    assert not after.file.state().was_kept
    assert after.found() == []
    again.engine.close(LIMIT_S)


def test_a_second_server_on_the_path_is_refused_until_the_first_has_closed(
    disk: Disk, path: Path
) -> None:
    other = Rig()
    with pytest.raises(TransferError, match="in use by another process"):
        Disk(other, path)
    assert disk.file.close(LIMIT_S)
    Disk(other, path)
    other.engine.close(LIMIT_S)


def test_a_fork_that_lives_on_does_not_keep_a_closed_file(rig: Rig, path: Path) -> None:
    goes_on, ends = os.pipe()
    first = Disk(rig, path)
    if (child := os.fork()) == 0:
        os.close(ends)
        os.read(goes_on, 1)
        os._exit(0)
    try:
        assert first.file.close(LIMIT_S)
        assert Disk(rig, path).file.close(LIMIT_S)
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(goes_on)


def test_a_byte_changed_on_the_disk_is_corrupt(disk: Disk) -> None:
    disk.rig.finish(Direction.STORE, ids(0, 1), ids(0, 1), 1)
    disk.write(ids(0, 1), 2, 1)
    at = 2**20 + 2 * (4096 + 4 * disk.rig.PIECE) + 4096 + 777
    with disk.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert disk.read(ids(2, 3), 2, 1).error == CORRUPT


def test_what_comes_after_the_close_fails_as_closed(disk: Disk) -> None:
    assert disk.file.close(LIMIT_S)
    closed = disk.write(ids(0, 1), 0, 1)
    assert (closed.status, closed.error) == (Status.FAILED, -4)
    assert not disk.file.state().is_ready


def test_a_hung_disk_shows_its_age_and_close_leaves_it_until_it_answers(disk: Disk) -> None:
    engine = disk.rig.engine
    sim.stop_disk(engine, "write")
    disk.file.submit(WriteOrder(5, ids(0, 1), ids(0), (key_of(1),), (0,)))
    while disk.file.state().oldest_op_s == 0:
        pass
    assert not disk.file.close(0.001)
    assert engine.poll() == []
    sim.let_disk_go(engine, "write")
    assert disk.finish(5).status is Status.DONE
    assert disk.file.close(LIMIT_S)


def test_a_file_whose_engine_is_closed_says_so_and_is_not_touched(disk: Disk) -> None:
    disk.rig.engine.close(LIMIT_S)
    state = disk.file.state()
    assert not state.is_ready
    assert "closed" in state.why
    assert disk.file.scan(10) == []
    assert disk.file.close(0.0)
    for call in (
        disk.file.reset,
        lambda: disk.file.submit(ReadOrder(1, ids(0, 1), ids(0), (key_of(1),))),
        lambda: disk.file.submit(WriteOrder(1, ids(0, 1), ids(0), (key_of(1),), (0,))),
    ):
        with pytest.raises(TransferError, match="is closed"):
            call()


def test_the_environment_makes_the_reads_of_a_whole_server_fail_or_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKV_SIM_DISK_FAIL_READS", "3")
    failing = Rig()
    disk = Disk(failing, path)
    disk.write(ids(0, 1), 0, 1)
    assert [disk.read(ids(2, 3), 0, 1).error for _ in range(2)] == [EIO, EIO]
    failing.engine.close(LIMIT_S)
    monkeypatch.delenv("CKV_SIM_DISK_FAIL_READS")
    monkeypatch.setenv("CKV_SIM_DISK_STOP_READS", "3")
    hung = Rig()
    disk = Disk(hung, path)  # the scan is the first to hang
    while disk.file.state().oldest_op_s == 0:
        pass
    assert not disk.file.close(0.0)
    sim.let_disk_go(hung.engine, "read")
    hung.engine.close(LIMIT_S)
    monkeypatch.setenv("CKV_SIM_DISK_STOP_READS", "two")
    with pytest.raises(TransferError, match="CKV_SIM_DISK_STOP_READS"):
        Rig()


def test_people_can_read_the_namespace_in_the_file(disk: Disk) -> None:
    assert disk.path.read_bytes()[8192:].startswith(b'{"model": "tiny"}\0')
    assert disk.path.stat().st_mode & 0o777 == 0o600


def test_slots_that_are_not_whole_pages_are_refused_and_padded_ones_serve(path: Path) -> None:
    vram = np.ones((4, 1000), dtype=np.uint8)
    layout = Layout((Region(vram.ctypes.data, 1000, 0, 1000),), 4, 1000, "cpu", 0)
    narrow = NativeEngine("sim", layout, 4)
    with pytest.raises(TransferError, match="whole pages"):
        narrow.open_disk(str(path), TUNING)
    narrow.close(LIMIT_S)
    assert layout.padded().slot_bytes == 4096
    wide = NativeEngine("sim", layout.padded(), 4)
    wide.open_disk(str(path), TUNING)
    wide.close(LIMIT_S)


def test_arrays_that_do_not_go_together_are_refused(disk: Disk) -> None:
    key = key_of(1)
    with pytest.raises(TransferError, match="do not go with"):
        disk.file.submit(ReadOrder(1, ids(0), ids(0), (key,)))
    with pytest.raises(TransferError, match="differ in length"):
        disk.file.submit(ReadOrder(1, ids(0, 1, 2, 3), ids(0, 1), (key, key[:4])))
    with pytest.raises(TransferError, match="disk slot 8 is not in 0"):
        disk.file.submit(ReadOrder(1, ids(0, 1), ids(8), (key,)))
    with pytest.raises(TransferError, match="slot -1 is not in 0"):
        disk.file.submit(WriteOrder(1, ids(0, -1), ids(0), (key,), (0,)))
    with pytest.raises(TransferError, match="depths"):
        disk.file.submit(WriteOrder(1, ids(0, 1), ids(0), (key,), ()))
    assert disk.rig.engine.poll() == [], "nothing was queued"
