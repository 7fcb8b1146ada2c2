"""The C++ tests as CMake builds them: once per preset, in the preset's folder."""

from __future__ import annotations

import shutil
import subprocess
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


def built(preset: str, target: str) -> Path:
    """The folder where a target stands. A build that is there is brought up to date."""
    run("cmake", "--preset", preset)
    run("cmake", "--build", "--preset", preset, "--target", target, "-j", "2")
    return REPO / "build" / preset
