"""The C++ tests as CMake builds them: once per preset, in the preset's folder."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def run(*command: str | Path, timeout_s: float = 600.0) -> str:
    """What a command printed; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPO,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@contextmanager
def only_builder(preset: str) -> Iterator[Path]:
    """The preset's folder, in which no other process of tests builds meanwhile."""
    folder = REPO / "build" / preset
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def built(preset: str, target: str) -> Path:
    """The folder where a target stands. A build that is there is brought up to date."""
    with only_builder(preset) as folder:
        run("cmake", "--preset", preset)
        run("cmake", "--build", "--preset", preset, "--target", target, "-j", "2")
    return folder
