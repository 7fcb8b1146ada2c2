"""Lines on DRAM: room for dram_bytes, the right to lock it, huge pages, the library that copies."""

from __future__ import annotations

import re
from collections.abc import Iterator

from continuum_connector import memory
from continuum_connector.config import FIRST_BYTES
from continuum_connector.memory import Headroom, find_room, read_keys, size
from continuum_connector.tools.checks.line import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import CudaSeen, Machine, NativeSeen, VllmSeen
from continuum_connector.tools.checks.plan import Plan

UNLIMITED = "`ulimit -l unlimited`, --ulimit memlock=-1 for a container"
HUGE = "sys/kernel/mm/transparent_hugepage"
# for anonymous memory in 2 MiB pages, from Linux 6.8 on; "inherit" defers to the setting above it
HUGE_2M = f"{HUGE}/hugepages-2048kB/enabled"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen, cuda: CudaSeen) -> Iterator[Line]:
    """Locking and huge pages matter only to a tier whose driver locks its memory."""
    # cuda or sim, chosen by the device as build.worker does; "" if the device is not known
    driver = {"cuda": "cuda", "cpu": "sim"}.get(vllm.platform, "")
    driver = driver or ("cuda" if cuda.gpus else "")
    room, locks = find_room(machine.root), driver != "sim"
    if room is None:
        yield unseen("DRAM", "the kernel does not say how much memory is available")
    elif plan.config.dram_bytes is None:
        yield _by_default(machine, room, on_cpu=not locks)
    else:
        yield _room(machine, plan, plan.config.dram_bytes, room, locks)
    if plan.config.dram_bytes != 0 and locks:
        yield _lock(machine, plan)
        yield _huge_pages(machine)
    yield _native(machine.see("native", NativeSeen), plan, driver, bool(cuda.gpus))


def _by_default(machine: Machine, room: Headroom, on_cpu: bool) -> Line:
    """What a server that starts now would take, as far as that is known before the KV cache is."""
    spare = memory.look(machine.environ, machine.root)
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    pools = memory.POOLS_ON_CPU if on_cpu else memory.POOLS
    times = f"{pools} times the KV cache" if pools > 1 else "as much as the KV cache"
    most = spare.usable // memory.share(spare, on_cpu)
    text = f"{has}; by default the tier grows to {size(most)} of it, or to {times} if that is less"
    if most < memory.LEAST:
        text = f"{has}; by default {size(most)} are for the tier: none, if the KV cache is larger"
        cure = "free memory, raise the container's limit, or set dram_bytes (0: no tier)"
        return warning("DRAM", text, cure)
    if spare.is_shared:
        text += "; a quarter, because a pod without a memory limit shares the machine"
    return ok("DRAM", f"{text} ({memory.SETS})")


def _room(machine: Machine, plan: Plan, dram_bytes: int, room: Headroom, locks: bool) -> Line:
    wanted = dram_bytes * plan.num_servers
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    asked = size(wanted) if wanted else "none"
    if wanted and plan.num_servers > 1:
        asked += f" (dram_bytes for each of {plan.num_servers} servers)"
    if wanted <= room.usable:
        return ok("DRAM", f"{has}; {asked} wanted{'' if wanted else ' (dram_bytes = 0)'}")
    text = f"{has} of it, {asked} are wanted"
    lower = f"lower dram_bytes to {size(room.usable // plan.num_servers)}"
    total = read_keys(machine.root / "proc/meminfo").get("MemTotal", 0) * 1024
    if not locks:
        text += ": the CPU build's tier grows by use, and the kernel kills the server there"
        return error("DRAM", text, f"{lower}, or leave it out")
    if total and wanted > total:
        text = f"the machine has {size(total)} in all, {asked} are wanted"
        return error("DRAM", text, lower)
    if room.usable < min(FIRST_BYTES * plan.num_gpus, wanted):
        return error("DRAM", f"{text}: no DRAM tier", "lower dram_bytes, or free memory")
    return warning("DRAM", f"{text}: the tier stops growing there", "lower dram_bytes to fit")


def _lock(machine: Machine, plan: Plan) -> Line:
    if machine.memlock is None:
        return ok("memlock", "no limit")
    limit = size(machine.memlock)
    if plan.config.dram_bytes is None:
        text = f"{limit}; a rank locks what its tier has grown to; some drivers refuse beyond"
        return warning("memlock", text, UNLIMITED)
    wanted = plan.config.dram_bytes // plan.num_ranks
    if machine.memlock >= wanted:
        return ok("memlock", f"{limit}, a rank locks {size(wanted)}")
    # NVIDIA's driver pins pages whatever the limit; other drivers and seccomp profiles may heed it.
    text = f"{limit}, where a rank locks {size(wanted)}; some drivers refuse"
    return warning("memlock", text, UNLIMITED)


def _huge_pages(machine: Machine) -> Line:
    # The word in brackets of "always [madvise] never" is chosen.
    said = [machine.text(path) or "" for path in (HUGE_2M, f"{HUGE}/enabled")]
    chosen = [word for each in said for word in re.findall(r"\[(\w+)\]", each)]
    chosen = [word for word in chosen if word != "inherit"]
    if not chosen:
        return unseen("huge pages", "the kernel does not say whether it has them")
    if chosen[0] == "never":
        text = "off in the kernel, so page-locking takes longer"
        return warning("huge pages", text, f"echo madvise > /{HUGE}/enabled")
    return ok("huge pages", f"the kernel gives them on request ({chosen[0]}), and the pool asks")


def _native(seen: NativeSeen, plan: Plan, driver: str, has_gpu: bool) -> Line:
    """Does the native library load, and over which driver will it copy?"""
    if seen.trouble and plan.config.dram_bytes == 0:
        text = f"{seen.trouble} No matter without a DRAM tier"
        return warning("native library", text, "install the package again")
    if seen.trouble:
        return error("native library", seen.trouble, "install the package again")
    library = f"loads (ABI {seen.abi})"
    if driver == "cuda" and not has_gpu:
        text = f"{library}; CUDA copies, without a GPU here"
        return unseen("native library", text, "run this where the server runs")
    if not driver:
        return unseen("native library", f"{library}; who copies depends on the server's device")
    over = "CUDA" if driver == "cuda" else "the simulated driver"
    return ok("native library", f"{library} and copies over {over}")
