"""Memory: how much the kernel lets us take, of the machine and of each cgroup we are in.

The pool stops growing by the same rule (csrc/available.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
CGROUP = "sys/fs/cgroup"
# the files with the limits and the usage, and the keys of memory.stat that count cache
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_Files = tuple[tuple[str, ...], str, tuple[str, str]]
MACHINE = "the machine"


class Headroom(NamedTuple):
    """`available` bytes, of which `reserve` stay with `owner`: the machine or a cgroup."""

    owner: str
    available: int
    reserve: int

    @property
    def usable(self) -> int:
        """Bytes that a pool may take."""
        return max(0, self.available - self.reserve)


def find_room(root: Path = Path("/")) -> Headroom | None:
    """The tightest bound: the machine's, or that of a memory cgroup this process is in; None if the
    kernel does not say. `root`: where /proc and /sys are."""
    meminfo = read_keys(root / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        return None
    total = meminfo.get("MemTotal", 0) * 1024
    rooms = [Headroom(MACHINE, meminfo["MemAvailable"] * 1024, _reserve(total))]
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += _snapshots(root / CGROUP, path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _snapshots(root / CGROUP / "memory", path, _V1)
    return min(rooms, key=lambda room: room.usable)


def _reserve(bound: int) -> int:
    """Bytes that we leave free, so that the kernel kills no process."""
    return max(GIB, bound // 50)


def _snapshots(mount: Path, path: str, files: _Files) -> Iterator[Headroom]:
    """Headroom of each cgroup, from the process's own up to the mount. A container often sees its
    own cgroup as the mount."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        room = _level(mount.joinpath(*parts[:depth]), files)
        if room is not None:
            yield room


def _level(folder: Path, files: _Files) -> Headroom | None:
    numbers = [_number(folder / file) for file in files[0]]
    limits = [number for number in numbers if number is not None]  # "max" sets no limit
    usage = _number(folder / files[1])
    if not limits or usage is None:
        return None
    limit = min(limits)
    stat = read_keys(folder / "memory.stat")
    cached = sum(stat.get(key, 0) for key in files[2])
    return Headroom("the memory cgroup", max(0, limit - max(0, usage - cached)), _reserve(limit))


def read_keys(path: Path) -> dict[str, int]:
    """The numbers in a file of `key number` lines, such as /proc/meminfo, without the colons."""
    found = {}
    for line in (_read(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The one number in a file; None if it holds anything else."""
    word = _read(path) or ""
    return int(word) if word.isdecimal() else None
