"""A libcuda of our own for processes of Python: tests/native/fake_cuda.cpp or another source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def compile_libcuda(source: Path, folder: Path) -> None:
    """Make `folder`/libcuda.so.1; skips where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1",
         "-I", REPO / "csrc", source, "-o", folder / "libcuda.so.1"],
        check=True,
    )  # fmt: skip


def python_over(code: str, libraries: Path) -> str:
    """What `code` prints, in a process of its own that finds this libcuda before any other."""
    others = os.environ.get("LD_LIBRARY_PATH")
    path = f"{libraries}:{others}" if others else str(libraries)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LD_LIBRARY_PATH": path},
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
