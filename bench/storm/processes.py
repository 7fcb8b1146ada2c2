"""A server's processes, from /proc: which there are, and what they hold."""

from __future__ import annotations

import re
from pathlib import Path

API_SERVER, ENGINE, WORKER = "API server", "EngineCore", "Worker"
ROLES = (API_SERVER, ENGINE, WORKER)
PROC = Path("/proc")


def processes(session: int) -> dict[int, str]:
    """Every live process of a server, by id: what it is. `session` is the API server's id."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and _session(folder) == session:
            pid = int(folder.name)
            found[pid] = API_SERVER if pid == session else _role(folder)
    return found


def resident_bytes(session: int) -> dict[str, int]:
    """RSS by role, without mapped files; of several processes of one role the sum.

    A library's pages are in memory or not as the system likes: a hundred MiB of an API server's
    went at once, on stock vLLM.
    """
    sums: dict[str, int] = {}
    for pid, role in processes(session).items():
        size = _resident(PROC / str(pid))
        sums[role] = sums.get(role, 0) + size
    return sums


def _session(folder: Path) -> int:
    """The session of a process; 0 of one that is gone, or waits only to be collected."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])


def _role(folder: Path) -> str:
    """vLLM names its processes; what Python's multiprocessing starts beside them has none."""
    try:
        line = (folder / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "gone"
    for role in (ENGINE, WORKER):
        if role in line:
            return role
    if "resource_tracker" in line:
        return "resource tracker"
    return "another process"


def _resident(folder: Path) -> int:
    try:
        status = (folder / "status").read_text()
    except OSError:
        return 0
    return 1024 * sum(
        int(size) for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.M)
    )
