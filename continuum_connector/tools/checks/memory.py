"""Lines on DRAM: room for dram_bytes, the right to lock it, huge pages, the library that copies.

It computes the room by the rule of csrc/available.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from continuum_connector.config import FIRST_BYTES
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import Facts, Machine
from continuum_connector.tools.checks.plan import Plan

HUGE = "sys/kernel/mm/transparent_hugepage"
# for anonymous memory in 2 MiB pages, from Linux 6.8 on; "inherit" defers to the setting above it
HUGE_2M = f"{HUGE}/hugepages-2048kB/enabled"


def lines(machine: Machine, plan: Plan, seen: Facts) -> Iterator[Line]:
    """Locking and huge pages matter only to a tier whose driver locks its memory."""
    locks = who_copies(plan, seen) != "sim"
    yield _room(machine, plan, locks)
    if plan.config.dram_bytes and locks:
        yield _lock(machine, plan)
        yield _huge_pages(machine, plan)
    yield _native(plan, seen)


def _room(machine: Machine, plan: Plan, locks: bool) -> Line:
    wanted = plan.config.dram_bytes * plan.num_servers
    first = FIRST_BYTES * plan.num_gpus
    room = find_room(machine)
    if room is None:
        return unseen("DRAM", "the kernel does not say how much memory is available")
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    asked = size(wanted) if wanted else "none"
    if wanted and plan.num_servers > 1:
        asked += f" (dram_bytes for each of {plan.num_servers} servers)"
    if wanted <= room.usable:
        why = "" if wanted else " (dram_bytes = 0)"
        return ok("DRAM", f"{has}; {asked} wanted{why}")
    text = f"{has} of it, {asked} are wanted"
    if not locks:
        text = f"{text}: a simulated tier grows by use, and the kernel kills the server there"
        return warning("DRAM", text, "lower dram_bytes to fit")
    if room.usable < min(first, wanted):
        return error("DRAM", f"{text}: no DRAM tier", "lower dram_bytes, or free memory")
    if plan.config.dram_shortage == "off":
        cure = f"lower dram_bytes to {size(room.usable)}, or set dram_shortage = smaller"
        return error("DRAM", f"{text}: no DRAM tier, as dram_shortage = off says", cure)
    return warning("DRAM", f"{text}: the tier stops growing there", "lower dram_bytes to fit")


def _lock(machine: Machine, plan: Plan) -> Line:
    wanted = plan.config.dram_bytes // plan.num_ranks
    if machine.memlock is None:
        return ok("memlock", "no limit")
    if machine.memlock >= wanted:
        return ok("memlock", f"{size(machine.memlock)}, a rank locks {size(wanted)}")
    # NVIDIA's driver pins pages whatever the limit; other drivers and seccomp profiles may heed it.
    text = f"{size(machine.memlock)}, where a rank locks {size(wanted)}; some drivers refuse"
    return warning("memlock", text, "`ulimit -l unlimited`, --ulimit memlock=-1 for a container")


def _huge_pages(machine: Machine, plan: Plan) -> Line:
    if not plan.config.huge_pages:
        text = "huge_pages = 0: small pages, which take longer to lock"
        return warning("huge pages", text, "set huge_pages = 1")
    chosen = _chosen(machine, HUGE_2M)
    if chosen in ("", "inherit"):
        chosen = _chosen(machine, f"{HUGE}/enabled")
    if not chosen:
        return unseen("huge pages", "the kernel does not say whether it has them")
    if chosen == "never":
        text = "off in the kernel, so page-locking takes longer"
        return warning("huge pages", text, f"echo madvise > /{HUGE}/enabled")
    return ok("huge pages", f"the kernel gives them on request ({chosen}), and the pool asks")


def _chosen(machine: Machine, path: str) -> str:
    """The word in brackets of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", machine.text(path) or "")
    return match[1] if match else ""


def who_copies(plan: Plan, seen: Facts) -> str:
    """cuda or sim, chosen by the device as build.worker does; "" if the device is not known."""
    if plan.config.driver != "auto":
        return plan.config.driver
    by_platform = {"cuda": "cuda", "cpu": "sim"}.get(seen.vllm.platform, "")
    return by_platform or ("cuda" if seen.cuda.gpus else "")


def _native(plan: Plan, seen: Facts) -> Line:
    """Does the native library load, and over which driver will it copy?"""
    if seen.native.trouble:
        if not plan.config.dram_bytes:
            text = f"{seen.native.trouble} No matter without a DRAM tier"
            return warning("native library", text, "install the package again")
        return error("native library", seen.native.trouble, "install the package again")
    library = f"loads (ABI {seen.native.abi})"
    driver = who_copies(plan, seen)
    if driver == "sim" and seen.vllm.platform == "cuda":
        text = f"{library}, but driver = sim cannot copy from a GPU"
        return error("native library", text, "leave driver at auto")
    if driver == "cuda" and not seen.cuda.gpus:
        text = f"{library}; driver = cuda without a GPU here"
        return unseen("native library", text, "run this where the server runs")
    if not driver:
        return unseen("native library", f"{library}; who copies depends on the server's device")
    over = "CUDA" if driver == "cuda" else "the simulated driver"
    return ok("native library", f"{library} and copies over {over}")


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


class Headroom(NamedTuple):
    """`available` bytes, of which `reserve` stay with `owner`: the machine or a cgroup."""

    owner: str
    available: int
    reserve: int

    @property
    def usable(self) -> int:
        """Bytes that a pool may take."""
        return max(0, self.available - self.reserve)


def find_room(machine: Machine) -> Headroom | None:
    """The tightest bound: the machine's, or that of a memory cgroup this process is in."""
    meminfo = machine.keys("proc/meminfo")
    if "MemAvailable" not in meminfo:
        return None
    total = meminfo.get("MemTotal", 0) * 1024
    rooms = [Headroom("the machine", meminfo["MemAvailable"] * 1024, _reserve(total))]
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += _snapshots(machine, CGROUP, path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _snapshots(machine, f"{CGROUP}/memory", path, _V1)
    return min(rooms, key=lambda room: room.usable)


def _reserve(bound: int) -> int:
    """Bytes that we leave free, so that the kernel kills no process."""
    return max(GIB, bound // 50)


def _snapshots(machine: Machine, mount: str, path: str, files: _Files) -> Iterator[Headroom]:
    """Headroom of each cgroup, from the process's own up to the mount. A container often sees its
    own cgroup as the mount."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        room = _level(machine, "/".join([mount, *parts[:depth]]), files)
        if room is not None:
            yield room


def _level(machine: Machine, folder: str, files: _Files) -> Headroom | None:
    numbers = [machine.number(f"{folder}/{file}") for file in files[0]]
    limits = [number for number in numbers if number is not None]  # "max" sets no limit
    usage = machine.number(f"{folder}/{files[1]}")
    if not limits or usage is None:
        return None
    limit = min(limits)
    stat = machine.keys(f"{folder}/memory.stat")
    cached = sum(stat.get(key, 0) for key in files[2])
    return Headroom("the memory cgroup", max(0, limit - max(0, usage - cached)), _reserve(limit))
