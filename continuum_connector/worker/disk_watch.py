"""DiskWatch: a thread beside a rank's file on a disk, for what may take as long as the disk does.

It keeps on the disk how much of the write budget is spent, so that a server that is killed again
and again writes no more than one that lives; and it looks whether the file is still in its place.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path

from continuum_connector.messages import DiskSpent

logger = logging.getLogger(f"vllm.{__name__}")

LOOK_S = 30.0  # between two looks at the file's place
_PAGE = 256  # bytes that are read and written: far less than what a disk writes at once


class SpentFile:
    """How much of the budget is spent, in a small file beside the blocks'.

    It is written in place, so that it needs no room on a disk that is full. `clock`: seconds of the
    wall clock, the only one that goes on while nothing runs. Where it was put back meanwhile, no
    time has passed.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock

    def read(self) -> DiskSpent | None:
        """What an earlier server left; None if there was none, or it left nothing that we know.
        BLOCKS as long as the disk does."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = json.loads(file.read(_PAGE))
            num_bytes, at = float(found["spent_bytes"]), float(found["at"])
            if isfinite(num_bytes) and isfinite(at) and num_bytes >= 0:
                return DiskSpent(int(num_bytes), max(0.0, self._clock() - at))
        return None

    def write(self, num_bytes: int) -> None:
        """BLOCKS until it is on the disk, or raises OSError."""
        text = json.dumps({"spent_bytes": num_bytes, "at": self._clock()}).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.pwrite(descriptor, text.ljust(_PAGE - 1) + b"\n", 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


class DiskWatch:
    """Begun by whoever has opened the file at `path`. Only `start` and `look` touch the disk."""

    def __init__(self, path: Path, spent: SpentFile) -> None:
        self._path = path
        self._spent = spent
        self._is_over = False
        self._awake = threading.Event()  # there is something to do
        self._said: deque[int] = deque()  # bytes spent, not yet on the disk
        self._file: tuple[int, int] | None = None  # the one that we opened, until it is gone
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="continuum-disk-watch", daemon=True)

    def start(self) -> None:
        """BLOCKS as long as the disk does. Without a thread for it there is no watch."""
        with suppress(OSError):  # a disk that fails says so when it is used
            self._file = _file_at(self._path)
        with suppress(RuntimeError):  # the system has none to give
            self._thread.start()

    def spent(self, num_bytes: int) -> None:
        """So much is spent: it will be on the disk soon."""
        self._said.append(num_bytes)
        self._awake.set()

    def end(self) -> None:
        """Have the thread end, which nobody waits for."""
        self._is_over = True
        self._awake.set()

    def look(self) -> None:
        """Do what there is to do. BLOCKS as long as the disk does."""
        while self._said:
            self._keep(self._said.popleft())
        if self._file is not None and self._is_gone():
            self._file = None
            logger.warning(
                "%s is no longer the file that this server uses: it was removed, or its drive "
                "unmounted. The server goes on with it, and its room stays taken, until it ends; "
                "a restart finds none of it. Restart the server to begin a new file",
                self._path,
            )

    def _is_gone(self) -> bool:
        try:
            return _file_at(self._path) != self._file
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that fails says so when it is used
            return False

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._awake.wait(LOOK_S)
            self._awake.clear()
            is_over = self._is_over  # before the look, so that it is the last
            try:
                self.look()
            except Exception:  # the top of a thread
                logger.exception("the watch over %s has ended", self._path)
                return

    def _keep(self, num_bytes: int) -> None:
        try:
            self._spent.write(num_bytes)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot be written (%s), so a restart will not know how much of "
                    "disk_write_budget is spent, and may write a day's once more",
                    self._spent.path,
                    error.strerror,
                )
            self._has_failed = True


def _file_at(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
