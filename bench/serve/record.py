"""RunFolder: writes a run's folder while the run goes on, a line as soon as there is one."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import Distribution
from io import FileIO
from pathlib import Path

import msgspec

from bench.serve import results
from bench.serve.results import Program, Run, State, Turn

PACKAGES = ("continuum-connector", "vllm", "torch", "lmcache", "vllm-router")


class RunFolder:
    """One run's folder, open for writing. Lines are whole on disk when a method returns.
    `tell` is called after each turn."""

    def __init__(
        self, folder: Path, run: Run, tell: Callable[[RunFolder], None] = lambda folder: None
    ) -> None:
        """Begin the run: its record says `running` until `close`."""
        self.folder = folder
        self.run = run
        run.started = run.started or time.strftime("%Y-%m-%dT%H:%M:%S")
        results.write_run(folder, run)
        self._turns = (folder / results.TURNS).open("wb", buffering=0)
        self._programs = (folder / results.PROGRAMS).open("wb", buffering=0)
        self.num_turns = 0
        self.num_failed = 0
        self._tell = tell

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self.run.state == "running":
            self.close("interrupted", f"{kind.__name__}: {error}" if kind else "")

    def turn(self, turn: Turn) -> None:
        """A turn ended."""
        self.num_turns += 1
        self.num_failed += bool(turn.error)
        _append(self._turns, turn)
        self._tell(self)

    def program(self, program: Program) -> None:
        """A program ended."""
        _append(self._programs, program)

    def metrics(self, name: str, text: str) -> None:
        """The server's /metrics: `results.BEFORE` the first program, or `AFTER` the last; empty if
        it has none."""
        if text:
            (self.folder / name).write_text(text)

    def close(self, state: State, reason: str = "") -> None:
        """End the run and say how it ended."""
        for file in (self._turns, self._programs):
            file.close()
        self.run.state = state
        self.run.reason = reason
        results.write_run(self.folder, self.run)


def versions(path: str = "") -> dict[str, str]:
    """Of the packages that matter and are there, those in `path` (a PYTHONPATH) first."""
    found = {"python": platform.python_version()}
    where = [*filter(None, path.split(os.pathsep)), *sys.path]
    for name in PACKAGES:
        if package := next(iter(Distribution.discover(name=name, path=where)), None):
            found[name] = package.version
    return found


def machine() -> dict[str, str]:
    """What a reader must know of this machine; its name is none of their business."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count() or 1),
        "load_before": f"{os.getloadavg()[0]:.1f}",
    }
    return found | ({"gpu": gpu} if (gpu := _gpus()) else {})


def _gpus() -> str:
    """Name, driver and memory of each GPU, as nvidia-smi says; empty where it does not."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(line, capture_output=True, text=True, timeout=10, check=True).stdout
        return "; ".join(told.splitlines())
    return ""


def _append(file: FileIO, line: msgspec.Struct) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
