"""Lines on DRAM: room for dram_bytes, the right to lock it, huge pages, the library that copies."""

from __future__ import annotations

import re
from collections.abc import Iterator

from continuum_connector import dram
from continuum_connector.config import FIRST_BYTES
from continuum_connector.memory import Headroom, find_room, read_keys
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import Facts, Machine
from continuum_connector.tools.checks.plan import Plan

UNLIMITED = "`ulimit -l unlimited`, --ulimit memlock=-1 for a container"
HUGE = "sys/kernel/mm/transparent_hugepage"
# for anonymous memory in 2 MiB pages, from Linux 6.8 on; "inherit" defers to the setting above it
HUGE_2M = f"{HUGE}/hugepages-2048kB/enabled"


def lines(machine: Machine, plan: Plan, seen: Facts) -> Iterator[Line]:
    """Locking and huge pages matter only to a tier whose driver locks its memory."""
    locks = who_copies(seen) != "sim"
    room = find_room(machine.root)
    if room is None:
        yield unseen("DRAM", "the kernel does not say how much memory is available")
    elif plan.config.dram_bytes is None:
        yield _by_default(machine, room, on_cpu=not locks)
    else:
        yield _room(machine, plan, plan.config.dram_bytes, room, locks)
    if plan.config.dram_bytes != 0 and locks:
        yield _lock(machine, plan)
        yield _huge_pages(machine, plan)
    yield _native(plan, seen)


def _by_default(machine: Machine, room: Headroom, on_cpu: bool) -> Line:
    """What a server that starts now would take, as far as that is known before the KV cache is."""
    spare = dram.look(machine.environ, machine.root)
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    pools = dram.POOLS_ON_CPU if on_cpu else dram.POOLS
    times = f"{pools} times the KV cache" if pools > 1 else "as much as the KV cache"
    most = spare.usable // dram.share(spare, on_cpu)
    text = f"{has}; by default the tier grows to {size(most)} of it, or to {times} if that is less"
    if most < dram.LEAST:
        text = f"{has}; by default {size(most)} are for the tier: none, if the KV cache is larger"
        cure = "free memory, raise the container's limit, or set dram_bytes (0: no tier)"
        return warning("DRAM", text, cure)
    if spare.is_shared:
        text += "; a quarter, because a pod without a memory limit shares the machine"
    return ok("DRAM", f"{text} ({dram.SETS})")


def _room(machine: Machine, plan: Plan, dram_bytes: int, room: Headroom, locks: bool) -> Line:
    wanted = dram_bytes * plan.num_servers
    first = FIRST_BYTES * plan.num_gpus
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    asked = size(wanted) if wanted else "none"
    if wanted and plan.num_servers > 1:
        asked += f" (dram_bytes for each of {plan.num_servers} servers)"
    if wanted <= room.usable:
        why = "" if wanted else " (dram_bytes = 0)"
        return ok("DRAM", f"{has}; {asked} wanted{why}")
    text = f"{has} of it, {asked} are wanted"
    if not locks:
        text = f"{text}: the CPU build's tier grows by use, and the kernel kills the server there"
        cure = f"lower dram_bytes to {size(room.usable // plan.num_servers)}, or leave it out"
        return error("DRAM", text, cure)
    total = read_keys(machine.root / "proc/meminfo").get("MemTotal", 0) * 1024
    if total and wanted > total:
        text = f"the machine has {size(total)} in all, {asked} are wanted"
        return error("DRAM", text, f"lower dram_bytes to {size(room.usable // plan.num_servers)}")
    if room.usable < min(first, wanted):
        return error("DRAM", f"{text}: no DRAM tier", "lower dram_bytes, or free memory")
    return warning("DRAM", f"{text}: the tier stops growing there", "lower dram_bytes to fit")


def _lock(machine: Machine, plan: Plan) -> Line:
    if machine.memlock is None:
        return ok("memlock", "no limit")
    if plan.config.dram_bytes is None:
        text = f"{size(machine.memlock)}; a rank locks what its tier has grown to"
        return warning("memlock", f"{text}; some drivers refuse beyond", UNLIMITED)
    wanted = plan.config.dram_bytes // plan.num_ranks
    if machine.memlock >= wanted:
        return ok("memlock", f"{size(machine.memlock)}, a rank locks {size(wanted)}")
    # NVIDIA's driver pins pages whatever the limit; other drivers and seccomp profiles may heed it.
    text = f"{size(machine.memlock)}, where a rank locks {size(wanted)}; some drivers refuse"
    return warning("memlock", text, UNLIMITED)


def _huge_pages(machine: Machine, plan: Plan) -> Line:
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


def who_copies(seen: Facts) -> str:
    """cuda or sim, chosen by the device as build.worker does; "" if the device is not known."""
    by_platform = {"cuda": "cuda", "cpu": "sim"}.get(seen.vllm.platform, "")
    return by_platform or ("cuda" if seen.cuda.gpus else "")


def _native(plan: Plan, seen: Facts) -> Line:
    """Does the native library load, and over which driver will it copy?"""
    if seen.native.trouble:
        if plan.config.dram_bytes == 0:
            text = f"{seen.native.trouble} No matter without a DRAM tier"
            return warning("native library", text, "install the package again")
        return error("native library", seen.native.trouble, "install the package again")
    library = f"loads (ABI {seen.native.abi})"
    driver = who_copies(seen)
    if driver == "cuda" and not seen.cuda.gpus:
        text = f"{library}; CUDA copies, without a GPU here"
        return unseen("native library", text, "run this where the server runs")
    if not driver:
        return unseen("native library", f"{library}; who copies depends on the server's device")
    over = "CUDA" if driver == "cuda" else "the simulated driver"
    return ok("native library", f"{library} and copies over {over}")
