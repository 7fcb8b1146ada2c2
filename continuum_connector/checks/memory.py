"""Lines on memory: room for dram_bytes, the right to lock it, huge pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from continuum_connector.checks.line import Line, error, ok, unseen, warning
from continuum_connector.checks.machine import Machine
from continuum_connector.checks.plan import Plan
from continuum_connector.checks.room import find_room
from continuum_connector.checks.words import size
from continuum_connector.config import FIRST_BYTES

HUGE = "sys/kernel/mm/transparent_hugepage"
# of anonymous memory in 2 MiB pages, from Linux 6.8 on; "inherit" leaves it to the one above
HUGE_2M = f"{HUGE}/hugepages-2048kB/enabled"


def lines(machine: Machine, plan: Plan, driver: str) -> Iterator[Line]:
    """Nothing is said of locking and pages where there is no tier, or no driver that locks."""
    yield _room(machine, plan, driver != "sim")
    if plan.config.dram_bytes and driver != "sim":
        yield _lock(machine, plan)
        yield _huge_pages(machine, plan)


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
    # NVIDIA's driver pins pages without asking it; others, and seccomp profiles, may ask.
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
    return ok("huge pages", f"the kernel gives them to who asks ({chosen}), and the pool asks")


def _chosen(machine: Machine, path: str) -> str:
    """The word in brackets of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", machine.text(path) or "")
    return match[1] if match else ""
