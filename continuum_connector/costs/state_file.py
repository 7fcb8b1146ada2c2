"""The state file keeps what was learned across a restart, and delays no engine step.

The parts of the state come in Bites, generators that pause after some tens of microseconds, so that
no engine step pays for all of it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Mapping
from math import inf
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import msgspec

from continuum_connector import files
from continuum_connector.errors import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

VERSION = 1  # of the format; a file of another is not read
SAVE_EVERY_S = 60.0  # so a crash loses a minute of learning
MAX_BYTES = 64 << 20  # several times the most that all who save here can write
CLOSE_TIMEOUT_S = 5.0


class StateFile:
    """One JSON file, `{"version": 1, "state": {...}}`, replaced as a whole once a minute.

    `path`: "" means no file; a directory means one file in it, named after `tag` (model and
    device). The constructor reads it. If it cannot be read, there is one warning and a fresh start,
    and the file is kept under another name; ConfigError if it is not a file at all. `new_step`,
    `save` and `close` are for one thread. Another thread encodes and writes; while it is busy, for
    instance because the disk is slow, no save is due.
    """

    def __init__(
        self, path: str, tag: str = "", write: Callable[[str, bytes], None] | None = None
    ) -> None:
        self.path = file_in(path, tag) if path and os.path.isdir(path) else path
        self._loaded = _read(self.path) if path else {}
        self._write = write or files.put
        self._saved_at = -inf  # the first is due at once: a path that cannot be written shows early
        self._idle = threading.Event()
        self._idle.set()
        self._failed = False
        self._bites: Bites[Mapping[str, Any]] | None = None  # of the state that is being copied
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()  # None: stop
        self._thread: threading.Thread | None = None
        if path:
            self._thread = threading.Thread(target=self._run, name="continuum-state", daemon=True)
            self._thread.start()

    def restore(self, name: str, load_state: Callable[[object], int]) -> None:
        """Hand part `name` of what was read to `load_state`, which returns how many parts did not
        fit."""
        if name not in self._loaded:
            return
        num_dropped = load_state(self._loaded.pop(name))
        if num_dropped:
            logger.warning(
                "state_path = %r: %d entries of %r are not what this version writes, so these "
                "are learned again. Nothing to do, unless it recurs: then remove the file.",
                self.path,
                num_dropped,
                name,
            )

    def new_step(self, begin: Callable[[], Bites[Mapping[str, Any]]], now: float) -> None:
        """Take one bite of the state that `begin` produces, and save the state once it is
        complete."""
        if self._bites is None:
            if not self.is_due(now):
                return
            self._bites = begin()
        try:
            next(self._bites)
        except StopIteration as end:
            self._bites = None
            self.save(end.value, now)

    @property
    def is_saving(self) -> bool:
        """Whether `new_step` is part-way through a state."""
        return self._bites is not None

    def is_due(self, now: float) -> bool:
        """Whether to `save`: there is a file, a minute has passed, and the last state is
        written."""
        is_late = now - self._saved_at >= SAVE_EVERY_S
        return is_late and self._thread is not None and self._idle.is_set()

    def save(self, state: Mapping[str, Any], now: float) -> None:
        """Have `state` written soon; it must not change afterwards. Costs microseconds."""
        if self._thread is None:
            return
        self._saved_at = now
        self._idle.clear()
        self._queue.put(state)

    def close(self, state: Mapping[str, Any]) -> None:
        """Write `state` and stop; waits at most 5 s. Idempotent."""
        if self._thread is None:
            return
        self._queue.put(state)
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._thread = None

    def _run(self) -> None:
        while (state := self._queue.get()) is not None:
            try:
                self._write(self.path, _encode(state))
                self._failed = False
            except Exception as error:  # the top of a thread; the file is a convenience
                self._warn(error)
            self._idle.set()

    def _warn(self, error: Exception) -> None:
        """Warn once, until writing works again."""
        if not self._failed:
            logger.warning(
                "state_path = %r cannot be written (%s), so what is learned ends with this "
                "process; serving goes on. Make room or name a file in a writable directory.",
                self.path,
                error,
            )
        self._failed = True


def _encode(state: Mapping[str, Any]) -> bytes:
    """Encode part by part: encoding holds the GIL, and a step may need it in between."""
    encoder = msgspec.json.Encoder()
    parts = [encoder.encode(name) + b":" + _encode_part(encoder, state[name]) for name in state]
    return b'{"version":%d,"state":{%s}}\n' % (VERSION, b",".join(parts))


def _encode_part(encoder: msgspec.json.Encoder, part: Any) -> bytes:
    if not isinstance(part, dict):
        return encoder.encode(part)
    items = (encoder.encode(k) + b":" + _encode_part(encoder, v) for k, v in part.items())
    return b"{%s}" % b",".join(items)


def _read(path: str) -> dict[str, Any]:
    """The state in `path`; empty if there is no file, or one that we did not write."""
    if kind := files.no_file(path):
        raise ConfigError(
            f"state_path = {path!r} is {kind}, so what is learned could not be kept in it; name a "
            "file, or remove what is there"
        )
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _unusable(path, error.strerror or str(error))
    if len(content) > MAX_BYTES:
        return _unusable(path, f"it is larger than {MAX_BYTES} bytes")
    try:
        found = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _unusable(path, str(error))
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict):
        return _unusable(path, "it is not a state file")
    if found.get("version") != VERSION:
        return _unusable(path, f"its version is {found.get('version')!r}, not {VERSION}")
    state: dict[str, Any] = found["state"]
    return state


def _unusable(path: str, reason: str) -> dict[str, Any]:
    """Move the file aside, because it may be somebody else's, or of use to another version of
    ours."""
    path_itself = os.path.realpath(path)
    names = (f"{path_itself}.unusable{end}" for end in ("", *(f".{n}" for n in range(1, 100))))
    aside = next((name for name in names if not os.path.lexists(name)), f"{path_itself}.unusable")
    try:
        os.replace(path_itself, aside)
        kept = f"The file is kept as {aside}."
    except OSError as error:
        kept = f"The file cannot be moved ({error.strerror}) and will be replaced if it can be."
    logger.warning(
        "state_path = %r cannot be used (%s), so tool times and costs are learned from the start. "
        "%s",
        path,
        reason,
        kept,
    )
    return {}


def file_in(directory: str, tag: str) -> str:
    """The file in `directory` for `tag`: "MODEL GPU"."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", tag).strip("-.") or "state"
    return os.path.join(directory, f"continuum-{slug[:100]}.json")


T = TypeVar("T")

Bites: TypeAlias = Generator[None, None, T]  # some tens of microseconds between two yields


def run_to_end(bites: Bites[T]) -> T:
    """Run all bites at once, for callers that have the time."""
    end: list[T] = []

    def last() -> Generator[None, None, None]:
        end.append((yield from bites))

    for _ in last():
        pass
    return end[0]
