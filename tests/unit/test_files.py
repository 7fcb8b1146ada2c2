"""Files: a write destroys nothing but what it replaces, and only what is a file is used as one."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
from pathlib import Path

import pytest

from continuum_connector import files


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_a_link_points_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    target, link = tmp_path / "volume" / "state", tmp_path / "state"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    files.put(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path / "volume") == ["state"]


def test_a_secret_file_is_secret_before_anything_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    path.touch(0o600)
    seen = []

    def see(descriptor: int) -> None:
        seen.append(os.fstat(descriptor).st_mode & 0o777)

    monkeypatch.setattr(os, "fsync", see)
    files.put(path, b"x" * 100_000)
    assert seen == [0o600]


def test_whoever_is_killed_before_a_file_is_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    if (child := os.fork()) == 0:
        os.fsync = lambda _descriptor: os.kill(os.getpid(), signal.SIGKILL)
        files.put(path, b"new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["state"]


def no_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without files that have no name."""
    plain = os.open

    def refuse(path: str, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return plain(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("is_nameless", [True, False])
@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_name_that_is_there_is_not_written_through(
    tmp_path: Path, planted: str, is_nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even whoever guessed it: the write fails, and what the link points to stays."""
    if not is_nameless:
        no_nameless(monkeypatch)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda num: "guessed")
    beside = tmp_path / ".continuum-guessed"
    beside.symlink_to(victim) if planted == "link" else beside.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        files.put(tmp_path / "state", b"new")
    assert victim.read_bytes() == beside.read_bytes() == b"precious"
    assert not (tmp_path / "state").exists()


def test_a_link_put_where_the_new_file_was_moves_no_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write into a user's folder (`--report` under sudo), who sees the name."""
    no_nameless(monkeypatch)
    victim, path = tmp_path / "victim", tmp_path / "volume" / "state"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    path.parent.mkdir()
    path.touch()
    path.chmod(0o666)
    owned = []
    ask = os.stat

    def swap_then_ask(name: object, **options: object) -> os.stat_result:
        for beside in set(os.listdir(path.parent)) - {path.name}:
            os.unlink(path.parent / beside)
            os.symlink(victim, path.parent / beside)
        return ask(name, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "stat", swap_then_ask)
    monkeypatch.setattr(os, "chown", lambda name, *ids: owned.append(name))
    files.put(path, b"new")
    monkeypatch.undo()
    assert victim.stat().st_mode & 0o777 == 0o600
    assert all(isinstance(name, int) for name in owned), "an open file, not what a name stands for"
    assert len(owned) == 2


@pytest.mark.parametrize("kind", ["a named pipe", "a socket"])  # and no device of this machine
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, kind: str) -> None:
    path, link = tmp_path / "odd", tmp_path / "link"
    link.symlink_to(path)
    with socket.socket(socket.AF_UNIX) as bound:
        os.mkfifo(path) if kind == "a named pipe" else bound.bind(str(path))
    for each in (path, link):
        with pytest.raises(OSError, match=f"it is {kind}"):
            files.put(each, b"new")
    assert files.no_file(path) == kind
    assert names(tmp_path) == ["link", "odd"]


@pytest.mark.parametrize("is_nameless", [True, False])
def test_names_beside_a_file_are_no_two_times_the_same(
    tmp_path: Path, is_nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_nameless:
        no_nameless(monkeypatch)
    used: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (used.append(a), replace(a, b)))
    for _ in range(3):
        files.put(tmp_path / "state", b"x")
    assert len(set(used)) == 3
    assert all(len(Path(each).name) > 32 for each in used)
    assert names(tmp_path) == ["state"]


def test_whoever_may_read_a_new_file_is_for_the_umask_to_say(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.put(tmp_path / "state", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_has_a_name_and_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
    said = {name: files.no_file(str(tmp_path / name)) for name in [*names(tmp_path), "none", ""]}
    pipe = "a named pipe"
    assert said == {
        "file": "",
        "none": "",
        "pipe": pipe,
        "to pipe": pipe,
        "s": "a socket",
        "": "a folder",
    }
    assert files.no_file("/dev/null") == "a device"


def test_two_names_of_one_file_are_one(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.touch()
    (tmp_path / "hard").hardlink_to(one)
    (tmp_path / "soft").symlink_to(one)
    (tmp_path / "folder").symlink_to(tmp_path)
    for other in ("one", "hard", "soft", "folder/one"):
        assert files.is_same(one, tmp_path / other)
    assert not files.is_same(one, tmp_path / "none")
    assert files.is_same(tmp_path / "none", tmp_path / "folder" / "none"), "if it is made"
