"""Memory: how much the kernel lets us take, how much of it a server's tier takes, and how operators
write sizes.

The first is of the machine and of each cgroup we are in; the pool stops growing by the same rule
(csrc/available.cpp). The second is for servers where nobody says (`dram_bytes` left out).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from continuum_connector.errors import ConfigError

# --- sizes, as operators write them ------------------------------------------------------
MIN_TIER_BYTES = 1024  # of DRAM or a disk: who writes 64 means 64GiB

_UNITS = {"": 1, "b": 1}
for _i, _u in enumerate("kmgt", start=1):
    _UNITS |= {_u: 1024**_i, f"{_u}i": 1024**_i, f"{_u}ib": 1024**_i, f"{_u}b": 1000**_i}


def parse_bytes(text: str) -> int:
    """Read a human size: "64GiB", "1.5 TiB", "500MB", "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(f"{text!r} is not a size")
    if unit == 1 and "." in match[1]:
        raise ValueError(f"{text!r} is less than whole bytes")
    return int(Decimal(match[1]) * unit)


def check_units(**tiers: int) -> None:
    """Refuse a tier's size without its unit, before vLLM loads weights for it."""
    for key, num_bytes in tiers.items():
        if 0 < num_bytes < MIN_TIER_BYTES:
            raise ConfigError(
                f"{key} = {num_bytes} is in bytes and holds no block, so nothing could be kept; "
                f'write the unit, such as "{num_bytes}GiB", or 0 for no tier'
            )


def size(num_bytes: float) -> str:
    """ "12.0 GiB", "8.0 MiB", "64.0 KiB"."""
    value, units = num_bytes / 1024, ["GiB", "MiB", "KiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.1f} {units[-1]}"


# --- how much the kernel lets us take -----------------------------------------------------
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
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
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
    """Headroom of each cgroup with a limit, from the process's own up to the mount. A container
    often sees its own cgroup as the mount."""
    limit_files, usage_file, cache_keys = files
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        numbers = [read_number(folder / file) for file in limit_files]
        limits = [n for n in numbers if n is not None and n >= 0]  # "max" and -1 set no limit
        usage = read_number(folder / usage_file)
        if limits and usage is not None:
            stat = read_keys(folder / "memory.stat")
            used = max(0, usage - sum(stat.get(key, 0) for key in cache_keys))
            available = max(0, min(limits) - used)
            yield Headroom("the memory cgroup", available, _reserve(min(limits)))


def read_keys(path: Path) -> dict[str, int]:
    """The numbers in a file of `key number` lines, such as /proc/meminfo, without the colons."""
    found = {}
    for line in (read_text(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def read_text(path: Path) -> str | None:
    """The file's text without the newline at its end; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """The one number in a file; None if it holds anything else."""
    word = read_text(path) or ""
    return int(word) if word.removeprefix("-").isdecimal() else None


# --- how much a tier takes if nobody says -------------------------------------------------
# It is a share of what the node can spare, and at most a few times the KV cache, because DRAM that
# holds everything that comes back gains nothing by being larger. The node is looked at once, before
# any process of the server takes memory, and what was seen goes with vLLM's config into all of them
# (vllm/served.py), so that all halves and engines compute the same size. It is a bound: the pool
# grows as blocks need it, and looks again before it takes more (csrc/host_pool.cpp).

POOLS = 4  # times the KV cache in VRAM
POOLS_ON_CPU = 1  # there the KV cache is DRAM, and VLLM_CPU_KVCACHE_SPACE says how much may be
SHARE = 2  # one part in so many: the rest is for vLLM's own processes, and for other servers
# Beside pods that we do not see, without a limit of our own; or where weights and KV cache are yet
# to come out of the same memory.
MODEST_SHARE = 4
LEAST = GIB  # one agent's context of a model of 8B
POD = "KUBERNETES_SERVICE_HOST"  # in every pod
SETS = "CONTINUUM_DRAM_BYTES sets it, 0 turns it off"


class Spare(NamedTuple):
    """What a node had to spare when its server started: `usable` bytes, by `owner`; `is_shared`:
    with pods that we do not see, and without a limit of our own."""

    owner: str
    usable: int
    is_shared: bool = False


class Taken(NamedTuple):
    """`num_bytes` for the tier on this node, 0 for none, and `why`, as a clause. For each byte that
    it takes, the pool leaves `num_left` to others."""

    num_bytes: int
    why: str
    num_left: int = 1


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Spare:
    """What this node has to spare now. `root`: where /proc and /sys are."""
    room = find_room(root)
    if room is None:
        return Spare("a kernel that does not say what is available", 0)
    return Spare(room.owner, room.usable, room.owner == MACHINE and POD in environ)


def share(spare: Spare, on_cpu: bool) -> int:
    """How many parts of what is spare make one for this server."""
    return MODEST_SHARE if on_cpu or spare.is_shared else SHARE


def may_take(spare: Spare | None) -> bool:
    """Whether there may be a tier, before anybody knows how large the KV cache is."""
    return spare is not None and spare.usable > 0


def take(spare: Spare | None, kv_bytes: int, on_cpu: bool) -> Taken:
    """How much the tier takes. `kv_bytes`: the KV caches of all engines on this node."""
    if spare is None:
        return Taken(0, "nobody could look how much memory is spare: with Ray, or without plugins")
    parts, pools = share(spare, on_cpu), POOLS_ON_CPU if on_cpu else POOLS
    part, bound = spare.usable // parts, pools * kv_bytes
    words = {2: "half", 4: "a quarter"}[parts]
    seen = f"{words} of the {size(spare.usable)} that {spare.owner} can spare"
    if part < min(LEAST, bound):
        return Taken(0, f"{seen} is less than {size(min(LEAST, bound))}, too little for a tier")
    times = f"{pools} times the KV cache" if pools > 1 else "as much as the KV cache"
    if bound <= part:
        return Taken(bound, f"{times}, which is less than {seen}", parts - 1)
    return Taken(part, f"{seen}, which is less than {times}", parts - 1)


def node_ranks(engine_ranks: int, node_engines: int, num_engines: int, num_nodes: int) -> int:
    """Ranks on one of `num_nodes` nodes that runs `node_engines` of `num_engines` engines.

    An engine spans nodes only if there are more nodes than the engines need (config/parallel.py,
    nnodes_within_dp). 0 engines: a node that only answers clients.
    """
    num_groups = max(1, num_engines // max(1, node_engines))
    nodes_per_engine = max(1, num_nodes // num_groups)
    return max(1, engine_ranks // nodes_per_engine) * max(1, node_engines)
