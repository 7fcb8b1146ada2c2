"""Namespace: the digest of everything that a block's bytes depend on, including the weights.

Blocks on a disk under another namespace are foreign. So a restart finds its KV again only if it
serves the same model in the same way: not with other weights in the same files, another layout or
another vLLM. If something cannot be proven equal, each start has its own namespace.

Reading the weights takes about a minute per 100 GB, on the disk's own thread, the first time. The
result is remembered with what changes whenever a file does: inode, size, times. No file is believed
unread: a blob of the Hugging Face cache is named after its content, but whoever edits the weights
in place leaves it that name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum_connector import files
from continuum_connector.errors import TransferError
from continuum_connector.worker.disk import ENDED, Namespace
from continuum_connector.worker.layout import Layout

logger = logging.getLogger(f"vllm.{__name__}")

FORMAT = 2  # of the facts, and of how weights are read; the file's own is the native library's
MEMORY = "weights.json"  # in the same folder, for all models that were served with it
MAX_REMEMBERED = 2048  # files of other models; the earliest read are forgotten first
_READ_BYTES = 2**23
_NICER = 10  # added to the server's nice level, because the server is busy meanwhile
_MARGIN_S = 2.0  # the system knows to about a second when a process began

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SMALL = (".json", ".py")


@dataclass(frozen=True)
class Checkpoint:
    """The folder whose files became the model. `since`: they were loaded after that, in seconds of
    the wall clock. `why`: why they cannot be proven the same, "" if they can. `has_other_formats`:
    the operator asked for a format other than safetensors."""

    folder: str = ""
    since: float = 0.0
    has_other_formats: bool = False
    why: str = ""


def prover(
    facts: Callable[[], Mapping[str, Any]],
    checkpoint: Callable[[], Checkpoint],
    remember_in: str,
) -> Callable[[Layout, Callable[[], bool]], Namespace]:
    """Make what WorkerDisk calls to get its namespace. The call BLOCKS while it reads the
    weights."""

    def prove(layout: Layout, is_over: Callable[[], bool]) -> Namespace:
        proof: list[Any] = [secrets.token_hex(32)]  # of nothing: this start's own
        reader = Reader(Path(remember_in, MEMORY), is_over)
        try:
            proof = _behind(lambda: reader.digest(checkpoint()))
        except (OSError, UnprovenError) as error:
            logger.warning("A restart will not find again what is on the disk: %s", error)
        regions = [[each.dev_stride, each.host_offset, each.num_bytes] for each in layout.regions]
        known = {"format": FORMAT, **facts(), "regions": regions, "slot_bytes": layout.slot_bytes}
        known |= {"order": layout.order, "weights": proof}
        text = json.dumps(known, sort_keys=True, default=str)
        return Namespace(hashlib.sha256(text.encode()).digest(), text)

    return prove


class UnprovenError(Exception):
    """What was read may not be what the server runs; the message says why."""


class Reader:
    """Reads a model's files and remembers what it read. Only one runs at a time
    (disk.only_one)."""

    def __init__(self, memory: Path, is_over: Callable[[], bool]) -> None:
        self._memory = memory
        self._is_over = is_over
        self._known: dict[str, list[Any]] = {}
        self._read: dict[str, list[Any]] = {}

    def digest(self, checkpoint: Checkpoint) -> list[list[Any]]:
        """[name, bytes, SHA-256] of each file that could have become the model, by name.

        UnprovenError if one has changed since `since`, because it may not be what was loaded, or if
        there are none.
        """
        if checkpoint.why:
            raise UnprovenError(checkpoint.why)
        self._known = self._recall()
        folder = Path(checkpoint.folder)
        paths = sorted(_files(folder, checkpoint.has_other_formats))
        if not any(path.suffix in _WEIGHTS for path in paths):
            raise UnprovenError(f"{folder} holds no weights that are known")
        found = []
        for path in paths:
            num_bytes, digest = self._of(path, checkpoint.since)
            found.append([path.relative_to(folder).as_posix(), num_bytes, digest])
        if any(self._known.get(path) != seen for path, seen in self._read.items()):
            self._remember()
        return found

    def _of(self, path: Path, since: float) -> tuple[int, str]:
        target = path.resolve()
        before, link = _seen(target), path.lstat()
        if max(link.st_ctime, before[-1] / 1e9) > since - _MARGIN_S:
            raise UnprovenError(
                f"{path} has changed since this process began, and may be another model"
            )
        size = before[3]
        known = self._known.get(str(target))
        digest = str(known[-1]) if known and known[:-1] == before else self._sum(target)
        if _seen(target) != before:
            raise UnprovenError(f"{path} has changed while it was read")
        self._read[str(target)] = [*before, digest]
        return size, digest

    def _sum(self, path: Path) -> str:
        total, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        with open(path, "rb", buffering=0) as file:
            while num := file.readinto(buffer):
                if self._is_over():
                    raise TransferError(ENDED)
                total.update(memoryview(buffer)[:num])
        return total.hexdigest()

    def _recall(self) -> dict[str, list[Any]]:
        with suppress(OSError, ValueError):
            known = json.loads(self._memory.read_bytes())
            if isinstance(known, dict) and all(isinstance(each, list) for each in known.values()):
                return known
        return {}

    def _remember(self) -> None:
        others = [each for each in self._known.items() if each[0] not in self._read]
        seen = dict(others[-MAX_REMEMBERED:]) | self._read
        try:
            files.put(self._memory, json.dumps(seen).encode(), mode=0o600)
        except OSError as error:  # then the next start reads the weights again
            logger.warning("%s could not be written: %s", self._memory, error)


def _files(folder: Path, has_other_formats: bool) -> Iterator[Path]:
    """Weights, and the files that say how to read them. If there are safetensors, vLLM loads
    nothing else (default_loader.py), unless the operator asked for another format."""
    has_safetensors = any(folder.glob("*.safetensors")) and not has_other_formats
    kinds = (".safetensors",) if has_safetensors else _WEIGHTS
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner) or inner[0] == "original"
        if path.suffix in (*kinds, *_SMALL) and not is_hidden and path.is_file():
            yield path


def _seen(path: Path) -> list[int]:
    """What changes whenever a file does, or the way it is read; the last number is when it changed,
    in ns."""
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return [FORMAT, found.st_dev, found.st_ino, found.st_size, *times]


def _behind(body: Callable[[], list[Any]]) -> list[Any]:
    """Run `body` on a nicer thread. The caller's own thread must not become nicer: that cannot be
    undone, and it would hand the level on to native threads, which turns wait for."""
    done: Future[list[Any]] = Future()

    def run() -> None:
        with suppress(OSError):
            own = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, own) + _NICER
            os.setpriority(os.PRIO_PROCESS, own, nice)
        try:
            done.set_result(body())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="continuum-weights", daemon=True).start()
    return done.result()
