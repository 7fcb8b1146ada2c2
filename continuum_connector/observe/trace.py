"""Trace: one JSON line per decision and per outcome, written by its own thread.

TraceFile: where the lines go. `path` is the newest file, `path.1` the one before it, and so on. A
file that is full is moved, and the number of files is bounded. Only their owner may read them,
because they name programs and tools.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

MAX_QUEUED = 65_536  # records; a turn makes about six, so minutes of a busy server
BATCH_S = 0.05  # how long the writer gathers records before it writes them at once
CLOSE_TIMEOUT_S = 5.0

_IDS = ("program", "request")  # fields that may hold what a client sent
_NOBODY = "anonymous:"  # prefix of names that are random already (programs/program.py)
_DIGEST_BYTES = 16

# event: when it is recorded
EVENTS: dict[str, str] = {
    "start": "the scheduler half is ready: version, policy, pool sizes",
    "arrive": "a turn enters the scheduler",
    "return": "the same, while its program's pin is live",
    "admit": "a turn goes from waiting to running, with its hits by tier",
    "preempt": "a running turn is put back",
    "readmit": "a turn that was put back goes from waiting to running again",
    "decision": "a turn is done and is pinned, offloaded or freed, and why",
    "outcome": "what came of a decision, once its program's next turn is admitted or given up",
    "pin_end": "a pin ends, with its cause and age",
    "store": "a transfer VRAM -> DRAM settled, with its outcome",
    "load": "a transfer DRAM -> VRAM settled, with its outcome",
    "write": "a transfer DRAM -> disk settled, with its outcome",
    "read": "a transfer disk -> DRAM settled, with its outcome",
    "tier_down": "a rank has no DRAM tier, and why",
    "disk_down": "the disk tier went down, and why",
    "epoch": "an epoch began, as weights changed or the prefix cache was reset: every hold ended",
    "switch": "an operator switched the connector on or off",
    "let_in": "a first turn that was held may be admitted: why, after how long",
    "stop": "the scheduler half shuts down",
}


class NullTrace:
    """No trace: the same interface, without thread and file."""

    enabled = False
    path = ""

    def record(self, event: str, now: float, **fields: Any) -> None:
        """Do nothing. Callers check `enabled` before they gather costly fields."""

    def take_dropped(self) -> int:
        """Return 0: what is not traced is not lost."""
        return 0

    def close(self) -> None:
        """Do nothing."""


class Trace:
    """Appends records to `path`; never makes the caller wait, whatever the disk does.

    `max_bytes`: that of TraceFile. `hashes_ids`: programs and requests are written as digests,
    whose key exists nowhere else.
    `record`, `take_dropped` and `close` are for one thread, the scheduler's. A record is
    `{"t": wall clock s, "now": monotonic s, "event": name, ...}`. Lines are on disk
    0.05 s after `record`, and all of them after `close` or the interpreter's exit.
    """

    enabled = True

    def __init__(
        self,
        path: str,
        max_queued: int = MAX_QUEUED,
        wall: Callable[[], float] = time.time,
        *,
        max_bytes: int = 0,
        hashes_ids: bool = False,
    ) -> None:
        self.path = path
        self._digest_key = secrets.token_bytes(32) if hashes_ids else b""
        self._max_queued = max_queued
        self._wall = wall
        self._file = TraceFile(path, max_bytes)
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None: wake up and close
        self._num_refused = 0  # by the scheduler's thread: the queue was full
        self._num_lost = 0  # by the writer's thread: it could not encode or write
        self._num_taken = 0
        self._broken = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="continuum-trace", daemon=True)
        self._thread.start()
        # runs at exit of the main process and of multiprocessing children, unlike atexit
        self._finalize = Finalize(None, self.close, exitpriority=10)

    def record(self, event: str, now: float, **fields: Any) -> None:
        """Queue one record in about a microsecond; the fields must not change afterwards."""
        if self._closing.is_set() or self._queue.qsize() >= self._max_queued:
            self._num_refused += 1
            return
        self._queue.put({"t": self._wall(), "now": now, "event": event, **fields})

    def take_dropped(self) -> int:
        """Return how many records were lost since the last call."""
        num_dropped = self._num_refused + self._num_lost
        taken, self._num_taken = self._num_taken, num_dropped
        return num_dropped - taken

    def close(self) -> None:
        """Write what is queued and stop; waits at most 5 s. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._finalize.cancel()

    def _run(self) -> None:
        """Write batches until closed. Batches keep the two threads from passing the GIL to and
        fro."""
        encoder = msgspec.json.Encoder(enc_hook=str)
        while not self._closing.is_set():
            first = self._queue.get()
            self._closing.wait(BATCH_S)
            self._write(encoder, first)
        self._write(encoder, None)
        self._file.close()

    def _write(self, encoder: msgspec.json.Encoder, first: dict[str, Any] | None) -> None:
        """Write `first` and all queued records. An error loses records, but never ends the
        thread."""
        records = [first, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        lines = [self._encode(encoder, record) for record in records if record is not None]
        lines = [line for line in lines if line]
        if self._broken:
            self._num_lost += len(lines)
        elif lines:
            self._append(b"".join(lines), len(lines))

    def _encode(self, encoder: msgspec.json.Encoder, record: dict[str, Any]) -> bytes:
        if self._digest_key:
            record |= {name: self._hashed(record[name]) for name in _IDS if record.get(name)}
        try:
            return encoder.encode(record) + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            self._num_lost += 1
            logger.warning("trace record %r is not JSON and is lost: %s", record["event"], error)
            return b""

    def _hashed(self, name: str) -> str:
        if name.startswith(_NOBODY):
            return name
        raw = name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(raw, digest_size=_DIGEST_BYTES, key=self._digest_key)
        return f"hashed:{digest.hexdigest()}"

    def _append(self, batch: bytes, num_records: int) -> None:
        try:
            self._file.append(batch)
        except OSError as error:
            self._broken = True
            self._num_lost += num_records
            logger.warning(
                "trace_path = %r: %s. The trace ends here and lost records are counted in "
                "continuum:trace_dropped; serving goes on. Make room, then restart to trace again.",
                self.path,
                error.strerror,
            )


def open_trace(config: ContinuumConfig) -> Trace | NullTrace:
    """Return the trace that the config asks for; an unusable path raises ConfigError."""
    if not config.trace_path:
        return NullTrace()
    return Trace(config.trace_path, max_bytes=config.trace_bytes, hashes_ids=config.trace_hashed)


MAX_FILES = 8  # kept of a trace, the one at trace_path among them
MODE = 0o600  # of files that we make; an existing file keeps its own


class TraceFile:
    """`append` adds whole lines. A file of `max_bytes` first moves to `path.1`; 0: it never moves.

    `max_files` are kept, including the newest. Several engines may append to one path: whichever
    finds it full moves it, under a lock, and the others follow, as they do after logrotate.
    """

    def __init__(self, path: str, max_bytes: int = 0, max_files: int = MAX_FILES) -> None:
        self._path = os.path.realpath(path)  # a link stays where it is, but its target moves
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
        """Continue in the file that has our name now, if ours was moved or removed."""
        if not self._has_our_name():
            following = _open(self._path)  # if this fails, the old file is still ours to close
            self.close()
            self._file = following

    def _begin_anew(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if self._has_our_name():  # no other engine has moved it
                for number in range(self._max_files - 1, 0, -1):
                    moved = f"{self._path}.{number - 1}" if number > 1 else self._path
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(moved, f"{self._path}.{number}")
        finally:  # if it cannot be moved, the other engines must not wait for ever
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._follow()

    def _has_our_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


def check(path: str) -> None:
    """Raise ConfigError if no trace could be written to `path`. Creates nothing."""
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
    """The names that full files of the trace at `path` get, the newest first."""
    newest = os.path.realpath(path)
    return (Path(f"{newest}.{number}") for number in itertools.count(1))


def older_files(path: Path) -> list[Path]:
    """The full files of the trace that exist, the newest first."""
    return list(itertools.takewhile(Path.is_file, older_names(path)))


def _open(path: str) -> int:
    """Open for appending, after ending a line that a crash cut short."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    info = os.fstat(file)
    is_begun = stat.S_ISREG(info.st_mode) and info.st_size > 0
    if is_begun and os.pread(file, 1, info.st_size - 1) != b"\n":
        os.write(file, b"\n")
    return file
