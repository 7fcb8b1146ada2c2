"""The watch over a rank's file: what is spent outlives the server, a file that is gone is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from continuum_connector.messages import DiskSpent
from continuum_connector.worker import disk as module
from continuum_connector.worker.disk import DiskWatch
from tests.fakes import FakeClock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: said.append(text % parts))
    return said


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskWatch:
    """Over a file in a folder of its own; the test itself says when it looks."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "rank.slab").touch()
    monkeypatch.setattr(module.threading.Thread, "start", lambda _self: None)
    watch = DiskWatch(folder / "rank.slab", FakeClock())
    watch.start()
    return watch


def test_what_was_spent_is_read_with_its_age(tmp_path: Path) -> None:
    clock = FakeClock()
    file = DiskWatch(tmp_path / "rank.slab", clock)
    assert file.spent_before() is None
    for num_bytes in (10**15, 7):  # the shorter leaves nothing of the longer
        file.spent(num_bytes)
        file.look()
        clock.advance(60.0)
        assert file.spent_before() == DiskSpent(num_bytes, 60.0)
    assert (tmp_path / "rank.spent").stat().st_mode & 0o777 == 0o600


def test_a_clock_that_was_put_back_brings_no_budget(tmp_path: Path) -> None:
    before = DiskWatch(tmp_path / "rank.slab", FakeClock(5000.0))
    before.spent(7)
    before.look()
    file = DiskWatch(tmp_path / "rank.slab", FakeClock(1000.0))
    assert file.spent_before() == DiskSpent(7, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"7", b"[]", b"null", b"\xff\x00", b"[" * 256, b"{}", b'{"spent_bytes": 7}'),
        *(b'{"spent_bytes": "x", "at": 1}', b'{"spent_bytes": 7, "at": NaN}'),
        *(b'{"spent_bytes": -1, "at": 1}', b'{"spent_bytes": 1e999, "at": 1}'),
        *(b'{"spent_bytes": null, "at": 1}', b'{"spent_bytes": 7, "at": [1]}', b" " * 10**6),
    ],
)
def test_what_we_did_not_write_is_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank.spent"
    path.write_bytes(content)
    assert DiskWatch(path.with_suffix(".slab"), FakeClock()).spent_before() is None
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text('{"spent_bytes": 7, "at": 1}')
    assert DiskWatch(path.with_suffix(".slab"), FakeClock()).spent_before() is None


def test_what_is_said_is_on_the_disk_after_the_next_look(watch: DiskWatch, tmp_path: Path) -> None:
    path = tmp_path / "disk" / "rank.spent"
    watch.look()
    assert not path.exists()
    watch.spent(5)
    watch.spent(6)
    watch.look()
    assert json.loads(path.read_text())["spent_bytes"] == 6
    watch.spent(6)  # as much as before, at another time
    path.unlink()
    watch.look()
    assert path.exists()


def test_a_disk_that_does_not_take_it_is_told_once(
    watch: DiskWatch, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: DiskWatch, _num_bytes: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(DiskWatch, "_write", refuse)
    for _ in range(3):
        watch.spent(5)
        watch.look()
    assert len(told) == 1
    assert "rank.spent cannot be written (Read-only file system)" in told[0]


@pytest.mark.parametrize("event", ["file", "folder", "another", "not a folder"])
def test_a_file_that_is_gone_is_told_once(
    event: str, watch: DiskWatch, told: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    watch.look()
    assert told == []
    if event == "file":
        (folder / "rank.slab").unlink()
    else:
        folder.rename(tmp_path / "kept")  # so that no other file gets its inode
    if event == "another":
        shutil.copytree(tmp_path / "kept", folder)
    if event == "not a folder":
        folder.touch()
    for _ in range(3):
        watch.look()
    assert len(told) == 1
    assert "rank.slab is no longer the file that this server uses" in told[0]
    assert "Restart the server" in told[0]


def test_a_disk_that_fails_is_not_gone(
    watch: DiskWatch, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "stat", fail)
        watch.look()
    watch.look()
    assert told == []
