"""One command played in this process, as a process of its own would run it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from continuum_connector.tools.cli import ending
from tests.fuzz.commands import Command

CODES = {ending.DONE, ending.FAILED, ending.USAGE, ending.UNSEEN, ending.STOPPED, 143}
MAX_LINES = 3  # on stderr: the sentence, and what a bar or a second sentence may add
PATIENCE_S = 60.0  # within which a command ends by itself, on the busiest machine
ENDLESS = ("continuum top", "continuum bench agents", "python -m")


@dataclass
class Played:
    """What came of it. `fault`: what is wrong with that, "" if nothing is."""

    title: str
    argv: list[str]
    code: int
    out: str
    err: str
    seconds: float
    fault: str = ""


class Sink(io.BytesIO):
    """Keeps what was written when the stream above it is closed."""

    def close(self) -> None:
        pass


def full() -> io.RawIOBase:
    """An output that takes nothing; a real one, as its user drops it by its number."""
    return open("/dev/full", "wb", buffering=0)


def closed() -> io.RawIOBase:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "wb", buffering=0)


def play(
    command: Command,
    words: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    output: str,
    limit_s: float,
) -> Played:
    """Run it with these words, that environment, and an output: utf-8, latin-1, full, closed."""
    began = time.monotonic()
    crash = ""
    code: Any = 0
    sinks = [Sink(), Sink()]
    limit_s = limit_s if command.title.startswith(ENDLESS) else PATIENCE_S
    with _world(command, words, folder, environ, output, sinks), _clock(limit_s) as rung:
        try:
            command.start()
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:  # while a module was loaded
            code = ending.STOPPED
        except BaseException:
            crash = traceback.format_exc()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
    out, err = (sink.getvalue().decode("utf-8", "replace") for sink in sinks)
    if isinstance(code, str):  # what Python would print
        code, err = 1, err + code
    played = Played(command.title, list(words), code or 0, out, err, time.monotonic() - began)
    played.fault = crash or _fault(played, bool(rung), output)
    return played


def _fault(played: Played, rung: bool, output: str) -> str:
    told = played.out + played.err
    lines = played.err.strip().splitlines()
    if played.code not in CODES:
        return f"exit code {played.code}: {played.err[-300:]}"
    if "Traceback (most" in told:
        return "a traceback"
    if "the memory does not suffice" in told:
        return "it wants more memory than there may be"
    if "geheim" in told:
        return f"a password: {told[-300:]}"
    if played.code in (1, 2) and not lines and not played.out and output != "closed":
        return f"code {played.code} without a word"
    if played.code in (1, 2) and len(lines) > MAX_LINES:
        return f"{len(lines)} lines on stderr: {played.err[:300]}"
    if any(len(line) > 3000 for line in lines):
        return "a line of more than 3000 characters"
    if "\x1b[31mred" in told or "\u202e" in told:
        return "a control character as it is"
    if "\U0001f604" in told:
        return "a name became a picture"
    if rung and not played.title.startswith(ENDLESS):
        return "it did not end"
    return ""


@contextlib.contextmanager
def _world(
    command: Command,
    words: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    output: str,
    sinks: Sequence[Sink],
) -> Iterator[None]:
    """argv, environment, folder and streams of its own; nothing is started."""
    before, path = os.getcwd(), list(sys.path)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    raw: Any = {"full": full, "closed": closed}.get(output, lambda: sinks[0])()
    encoding = output if output in ("latin-1", "ascii") else "utf-8"
    os.chdir(folder)
    try:
        with (
            patch.object(sys, "argv", [command.words[0], *command.words[1:], *words]),
            patch.dict(os.environ, environ),
            patch.object(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding)),
            patch.object(sys, "stderr", io.TextIOWrapper(sinks[1], "utf-8", "backslashreplace")),
            patch.object(subprocess, "Popen", _no_program),
            _no_long_work(folder),
        ):
            yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _no_program(words: Any, *_: object, **__: object) -> Any:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(words))


@contextlib.contextmanager
def _no_long_work(folder: Path) -> Iterator[None]:
    """`check` sees a made-up machine, the lab plays nothing."""
    from bench.sim import runner
    from tests.unit import fake_machine

    def machine(environ: Mapping[str, str]) -> Any:
        root = Path(tempfile.mkdtemp(dir=folder))
        return fake_machine.make(root, environ=environ)

    def played(*_: object, **__: object) -> Any:
        return runner.Outcome()

    with (
        patch("continuum_connector.tools.cli.check.this_machine", machine),
        patch.object(runner, "_do", lambda *_, **__: None),
    ):
        yield


@contextlib.contextmanager
def _clock(limit_s: float) -> Iterator[list[float]]:
    """Ctrl-C when the time is over, and again each second."""
    rung: list[float] = []

    def ring(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            return  # `ending.leave` is through: it would end this process, where many are played
        rung.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, ring)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
