"""The trace's files: appended to, begun anew when full, and bounded in number.

`path` is the newest, `path.1` the one before it, and so on. Only their owner may read them, because
they name programs and tools.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from continuum_connector.errors import ConfigError

MODE = 0o600  # of files that we make; one that is there already keeps its own


class TraceFile:
    """`append` adds whole lines; a file with `max_bytes` moves to `path.1` first, 0 for never.

    `max_files` are kept, the newest among them. Several engines may append to one path: who finds
    it full moves it, under a lock, and the others follow, as they do behind logrotate.
    """

    def __init__(self, path: str, max_bytes: int = 0, max_files: int = 2) -> None:
        self._path = os.path.realpath(path)  # a link stays where it is, what it points to moves
        self._max_bytes = max_bytes
        self._max_files = max_files
        try:
            self._file = _open(self._path)
        except OSError as error:
            raise _unusable(path, error.strerror) from error

    def append(self, batch: bytes) -> None:
        """Write all of `batch`; OSError if that fails."""
        self._follow()
        num_bytes = os.fstat(self._file).st_size
        if self._max_bytes and num_bytes and num_bytes + len(batch) > self._max_bytes:
            self._begin_anew()
        view = memoryview(batch)
        while view:
            view = view[os.write(self._file, view) :]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _follow(self) -> None:
        """Go on in the file that has our name now, if ours was moved or removed."""
        if not self._has_our_name():
            following = _open(self._path)  # if that fails, ours is still the one to close
            self.close()
            self._file = following

    def _begin_anew(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if self._has_our_name():  # nobody else was first
                for number in range(self._max_files - 1, 0, -1):
                    moved = f"{self._path}.{number - 1}" if number > 1 else self._path
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(moved, f"{self._path}.{number}")
        finally:  # whoever cannot move it keeps it open, and the others would wait for ever
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._follow()

    def _has_our_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


def check(path: str) -> None:
    """ConfigError if no trace could be written to `path`, of which nothing is made."""
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    if not os.path.isdir(folder):
        raise _unusable(path, os.strerror(errno.ENOENT))
    if not os.access(real if os.path.exists(real) else folder, os.W_OK):
        raise _unusable(path, os.strerror(errno.EACCES))


def _unusable(path: str, why: str | None) -> ConfigError:
    return ConfigError(
        f"trace_path = {path!r} cannot be written ({why}), so decisions would "
        "go unrecorded. Name a file in an existing, writable directory, or leave it empty."
    )


def older_names(path: Path) -> Iterator[Path]:
    """What files of the trace at `path` are called once they are full, the newest first."""
    newest = os.path.realpath(path)
    return (Path(f"{newest}.{number}") for number in itertools.count(1))


def older_files(path: Path) -> list[Path]:
    """Those of them that are there."""
    return list(itertools.takewhile(Path.is_file, older_names(path)))


def _open(path: str) -> int:
    """Open for appending; a line that a crash cut short is ended first."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    info = os.fstat(file)
    is_begun = stat.S_ISREG(info.st_mode) and info.st_size > 0
    if is_begun and os.pread(file, 1, info.st_size - 1) != b"\n":
        os.write(file, b"\n")
    return file
