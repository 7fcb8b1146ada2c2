"""Lines on NUMA: DRAM next to the GPU is faster, if the process may use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from continuum_connector.tools.checks.line import (
    Line,
    numbers_of,
    ok,
    several,
    size,
    unseen,
    warning,
)
from continuum_connector.tools.checks.machine import Gpu, Machine
from continuum_connector.tools.checks.plan import Plan

NODES = "sys/devices/system/node"


def lines(machine: Machine, plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    """Is there room for each GPU's share on its own node?"""
    nodes = [name for name in machine.names(NODES) if name.removeprefix("node").isdecimal()]
    if not nodes:
        yield unseen("NUMA", "the kernel does not say which nodes there are")
    elif len(nodes) == 1:
        yield ok("NUMA", "one node: all memory is equally near")
    elif not gpus:
        yield unseen("NUMA", f"{len(nodes)} nodes, and no GPU to be near")
    elif not plan.config.numa:
        text = f"{len(nodes)} nodes, and numa = 0 leaves to the system which memory is taken"
        yield warning("NUMA", text, "set numa = 1")
    else:
        yield from _near(machine, plan, gpus[: plan.num_gpus])


def _near(machine: Machine, plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    found = Counter(machine.number(f"sys/bus/pci/devices/{gpu.pci_id}/numa_node") for gpu in gpus)
    share = plan.config.dram_bytes // plan.num_ranks
    for node, number in found.items():
        if node is None or node < 0:
            text = f"which node {several('GPU', number)} belong to is not said (a virtual machine?)"
            yield unseen("NUMA", text)
        else:
            yield _node(machine, node, several("GPU", number), number * share)


def _node(machine: Machine, node: int, gpus: str, wanted: int) -> Line:
    status = machine.text("proc/self/status") or ""
    allowed = {
        line.partition(":")[0]: line.partition(":")[2].strip() for line in status.splitlines()
    }
    near = f"node {node}, of {gpus}"
    if node not in numbers_of(allowed.get("Mems_allowed_list", str(node))):
        text = f"this process may not use the memory of {near}: every copy crosses the sockets"
        return warning("NUMA", text, "a cpuset or numactl that includes it")
    cpus = numbers_of(machine.text(f"{NODES}/node{node}/cpulist") or "")
    if cpus and not cpus & numbers_of(allowed.get("Cpus_allowed_list", "") or _join(cpus)):
        text = f"this process may not run on the cores of {near}: whoever copies is far from it"
        return warning("NUMA", text, "a cpuset or numactl that includes it")
    free = free_bytes(machine, node)
    if wanted and free < wanted:
        text = f"{near} has {size(free)} free of the {size(wanted)} wanted; the rest lies far away"
        return warning("NUMA", text, "lower dram_bytes, or free that node's memory")
    return ok("NUMA", f"{near}, has {size(free)} free")


def free_bytes(machine: Machine, node: int) -> int:
    """What the node could give: free pages, and file cache that the kernel would drop."""
    words = (machine.text(f"{NODES}/node{node}/meminfo") or "").replace(f"Node {node} ", "")
    found = {}
    for line in words.splitlines():
        key, _, rest = line.partition(":")
        found[key.strip()] = int((rest.split() or ["0"])[0])
    kept = ("MemFree", "Inactive(file)", "Active(file)")
    return 1024 * sum(found.get(key, 0) for key in kept)


def _join(cpus: set[int]) -> str:
    return ",".join(map(str, cpus))
