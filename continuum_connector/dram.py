"""Dram: how much DRAM a server's tier takes if nobody says (`dram_bytes` left out).

It is a share of what the node can spare, and at most a few times the KV cache, because DRAM that
holds everything that comes back gains nothing by being larger. The node is looked at once, before
any process of the server takes memory, and what was seen goes with vLLM's config into all of them
(vllm/node.py), so that all halves and engines compute the same size. It is a bound: the pool grows
as blocks need it, and looks again before it takes more (csrc/host_pool.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from continuum_connector.memory import GIB, MACHINE, find_room
from continuum_connector.sizes import size

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
