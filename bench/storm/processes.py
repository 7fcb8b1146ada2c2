"""A server's processes, from /proc: which there are, what they hold, and what is left of them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

API_SERVER, ENGINE, WORKER = "API server", "EngineCore", "Worker"
ROLES = (API_SERVER, ENGINE, WORKER)
PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"


def processes(session: int) -> dict[int, str]:
    """Every live process of a server, by id: what it is. `session` is the API server's id."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and _session(folder) == session:
            pid = int(folder.name)
            found[pid] = API_SERVER if pid == session else _role(folder)
    return found


def pid_of(session: int, role: str) -> int:
    """The process that plays `role`; ProcessLookupError if there is none."""
    for pid, found in processes(session).items():
        if found == role:
            return pid
    raise ProcessLookupError(f"server {session} has no process {role}")


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


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The files of /dev/shm that these processes have mapped or open, and that still are there.

    Asked of the processes, for other servers of this machine keep theirs in the same folder.
    """
    found: set[str] = set()
    for pid in pids:
        found |= set(_mapped(PROC / str(pid)))
    return {name for name in found if Path(name).exists()}


def listens(port: int) -> bool:
    """Whether somebody answers on the port, or keeps it from the next server."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


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


def _mapped(folder: Path) -> list[str]:
    try:
        maps = (folder / "maps").read_text()
        opened = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
    except OSError:
        return []
    found = re.findall(rf"({SHARED_MEMORY}\S+)$", maps, re.M)
    return [*found, *(name for name in opened if name.startswith(SHARED_MEMORY))]
