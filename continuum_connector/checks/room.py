"""Room: how much memory the host pool may take. The rule is that of csrc/available.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from continuum_connector.checks.machine import Machine

GIB = 2**30
CGROUP = "sys/fs/cgroup"
# limits, usage, and the keys of memory.stat that are cache; version 2, version 1
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_Files = tuple[tuple[str, ...], str, tuple[str, str]]


class Room(NamedTuple):
    """`available` bytes, of which `reserve` stay with `owner`: the machine or a cgroup."""

    owner: str
    available: int
    reserve: int

    @property
    def usable(self) -> int:
        """What a pool may take."""
        return max(0, self.available - self.reserve)


def find_room(machine: Machine) -> Room | None:
    """The tightest bound: the machine's, or that of a memory cgroup this process is in."""
    meminfo = machine.keys("proc/meminfo")
    if "MemAvailable" not in meminfo:
        return None
    total = meminfo.get("MemTotal", 0) * 1024
    rooms = [Room("the machine", meminfo["MemAvailable"] * 1024, _reserve(total))]
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += _levels(machine, CGROUP, path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _levels(machine, f"{CGROUP}/memory", path, _V1)
    return min(rooms, key=lambda room: room.usable)


def _reserve(bound: int) -> int:
    """What is never taken: it keeps the kernel from killing somebody."""
    return max(GIB, bound // 50)


def _levels(machine: Machine, mount: str, path: str, files: _Files) -> Iterator[Room]:
    """From the process's cgroup up to the mount; a container often sees its own as the mount."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        room = _level(machine, "/".join([mount, *parts[:depth]]), files)
        if room is not None:
            yield room


def _level(machine: Machine, folder: str, files: _Files) -> Room | None:
    numbers = [machine.number(f"{folder}/{file}") for file in files[0]]
    limits = [number for number in numbers if number is not None]  # "max" is no number: no bound
    usage = machine.number(f"{folder}/{files[1]}")
    if not limits or usage is None:
        return None
    limit = min(limits)
    stat = machine.keys(f"{folder}/memory.stat")
    cached = sum(stat.get(key, 0) for key in files[2])
    return Room("the memory cgroup", max(0, limit - max(0, usage - cached)), _reserve(limit))
