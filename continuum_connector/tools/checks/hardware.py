"""Lines on the hardware, as a server started here would see it: GPUs, their driver, PCIe links and
near memory; then DRAM, and the library that copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from continuum_connector import memory
from continuum_connector.config import FIRST_BYTES
from continuum_connector.memory import find_room, read_keys, size
from continuum_connector.tools.checks import Line, error, ok, several, unseen, warning
from continuum_connector.tools.checks.machine import CudaSeen, Gpu, Machine, NativeSeen, VllmSeen
from continuum_connector.tools.checks.plan import Plan

BATCH_VERSION = 12080  # cuMemcpyBatchAsync, many copies in one call (csrc/cuda_types.h)
CURES = {  # what cuInit answers
    100: "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    802: "start nvidia-fabricmanager of the driver's release",
    803: "reboot, or reload the nvidia module: it is older than the libraries (or, in a container, "
    "the image brings its own libcuda)",
    804: "remove the cuda-compat libraries from LD_LIBRARY_PATH",
}
DEVICES, NODES = "sys/bus/pci/devices", "sys/devices/system/node"
LINKED = ("GH200", "GB200", "GB300")  # NVLink connects their CPU, so our copies do not use PCIe


def lines(machine: Machine, plan: Plan, vllm: VllmSeen, cuda: CudaSeen) -> Iterator[Line]:
    """What CUDA shows, how fast DRAM is reached, which DRAM is near, and how much there is."""
    yield from _cuda_lines(machine, plan, cuda, vllm.platform)
    links: dict[Line, list[str]] = {}  # one line per kind of link, with the GPUs that have it
    for index, gpu in enumerate(cuda.gpus):
        links.setdefault(_link(machine, gpu), []).append(str(index))
    for line, numbers in links.items():
        yield line._replace(text=f"GPU {', '.join(numbers)}: {line.text}")
    yield from _numa_lines(machine, plan, cuda.gpus)
    on_cpu = vllm.platform == "cpu"
    yield _dram(machine, plan, on_cpu)
    driver = "the simulated driver" if on_cpu else "CUDA" if cuda.gpus else ""
    yield _native(machine.see("native", NativeSeen), plan, driver)


def _cuda_lines(machine: Machine, plan: Plan, cuda: CudaSeen, platform: str) -> Iterator[Line]:
    """Which GPUs, how many, which driver?"""
    is_other = platform not in ("", "cuda")
    if not cuda.has_library and platform == "cpu":
        yield ok("GPU", "none, and vLLM's CPU build needs none; copies run in the simulator")
    elif not cuda.has_library and is_other and plan.config.dram_bytes:
        text = f"vLLM serves on {platform}, which the copy engine cannot copy from: no DRAM tier"
        yield error("GPU", text, "leave dram_bytes out, or at 0: pins work without it")
    elif not cuda.has_library:
        text = f"no CUDA driver here ({cuda.trouble})"
        yield unseen("GPU", text, "run this where the server runs")
    elif cuda.trouble:
        text = f"the CUDA driver does not start: {cuda.trouble} ({cuda.code})"
        yield error("GPU", text, CURES.get(cuda.code, "look at nvidia-smi and dmesg"))
    else:
        names = sorted({f"{gpu.name} ({size(gpu.num_bytes)})" for gpu in cuda.gpus})
        found = f"{several('GPU', len(cuda.gpus))}: {', '.join(names)}"
        if len(cuda.gpus) < plan.num_gpus:
            text = f"the server needs {plan.num_gpus} on this node, CUDA shows {found}"
            cure = "lower --tensor-parallel-size, or correct CUDA_VISIBLE_DEVICES"
            yield error("GPU", text, cure)
        else:
            yield ok("GPU", found)
        yield _driver(machine, cuda)
        if is_other:
            text = f"vLLM serves on {platform}, though there is a GPU"
            yield warning("platform", text, "install the CUDA build of vLLM")


def _driver(machine: Machine, cuda: CudaSeen) -> Line:
    module = machine.text("sys/module/nvidia/version") or "of an unknown release"
    text = f"driver {module}, CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}"
    if cuda.version < BATCH_VERSION:
        text = f"{text}: one call per copy, because it takes no batches before 12.8"
        return warning("driver", text, "a driver of release 570 or later")
    return ok("driver", f"{text}: many copies in one call")


def _link(machine: Machine, gpu: Gpu) -> Line:
    """The link as the kernel describes it. Its current speed says nothing: an idle link slows down
    to save power."""
    if any(name in gpu.name for name in LINKED):
        return ok("PCIe link", "its CPU is behind NVLink, faster than PCIe")
    at = f"{DEVICES}/{gpu.pci_id}"
    width, most = (machine.number(f"{at}/{which}_link_width") for which in ("current", "max"))
    own_speed = _speed(machine, at)
    if not (width and most and own_speed):
        return unseen("PCIe link", "the kernel does not say (a virtual machine?)")
    slot_speed = _speed(machine, str((machine.root / at).resolve().parent)) or own_speed
    speed = min(own_speed, slot_speed)
    rate = speed * width * (0.8 if speed < 8.0 else 128 / 130) / 8  # before packets' overhead
    said = f"x{width} at {speed:g} GT/s, {rate:.0f} GB/s a way"
    if width < most:
        text = f"{said}, of the GPU's x{most}: loads take {most // width} times as long"
        return warning("PCIe link", text, "another slot, a riser, or the BIOS's bifurcation")
    if slot_speed < own_speed:
        text = f"{said}: the GPU could do {own_speed:g} GT/s, its slot cannot"
        return warning("PCIe link", text, "another slot, or the BIOS's link speed, if it has one")
    return ok("PCIe link", said)


def _speed(machine: Machine, device: str) -> float:
    """GT/s per lane, the number in "32.0 GT/s PCIe"; 0 if there is none."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", machine.text(f"{device}/max_link_speed") or "")
    return float(match[1]) if match else 0.0


# --- near memory ------------------------------------------------------------------------------
def _numa_lines(machine: Machine, plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    """Is there room for each GPU's share on its own node?"""
    num = len([*machine.root.glob(f"{NODES}/node[0-9]*")])
    if not num:
        yield unseen("NUMA", "the kernel does not say which nodes there are")
    elif num == 1:
        yield ok("NUMA", "one node: all memory is equally near")
    elif not gpus:
        yield unseen("NUMA", f"{num} nodes, and no GPU to be near")
    elif not plan.config.numa:
        text = f"{num} nodes, and numa = 0 leaves to the system which memory is taken"
        yield warning("NUMA", text, "set numa = 1")
    else:
        ours = gpus[: plan.num_gpus]
        near = Counter(machine.number(f"{DEVICES}/{gpu.pci_id}/numa_node") for gpu in ours)
        for node, number in near.items():
            share = number * ((plan.config.dram_bytes or 0) // plan.num_ranks)
            yield _node(machine, node, several("GPU", number), share)


def _node(machine: Machine, node: int | None, gpus: str, wanted: int) -> Line:
    if node is None or node < 0:
        text = f"which node {gpus} belong to is not said (a virtual machine?)"
        return unseen("NUMA", text)
    allowed, near = machine.fields("proc/self/status"), f"node {node}, of {gpus}"
    cpus = _numbers(machine.text(f"{NODES}/node{node}/cpulist") or "")
    for what, key, its in (
        ("use the memory", "Mems_allowed_list", {node}),
        ("run on the cores", "Cpus_allowed_list", cpus),
    ):
        own = _numbers(allowed.get(key, ""))
        if its and own and not its & own:
            text = f"this process may not {what} of {near}: every copy crosses the sockets"
            return warning("NUMA", text, "a cpuset or numactl that includes it")
    has = machine.fields(f"{NODES}/node{node}/meminfo")
    # free pages, and file cache that the kernel would drop
    kept = (f"Node {node} {key}" for key in ("MemFree", "Inactive(file)", "Active(file)"))
    free = 1024 * sum(int(has.get(key, "0").split()[0]) for key in kept)
    if wanted and free < wanted:
        text = f"{near} has {size(free)} free of the {size(wanted)} wanted; the rest lies far away"
        return warning("NUMA", text, "lower dram_bytes, or free that node's memory")
    return ok("NUMA", f"{near}, has {size(free)} free")


def _numbers(text: str) -> set[int]:
    """The numbers in one of the kernel's lists, such as "0-3,8"."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {each for first, last in spans for each in range(int(first), int(last or first) + 1)}


# --- DRAM -------------------------------------------------------------------------------------
def _dram(machine: Machine, plan: Plan, on_cpu: bool) -> Line:
    """Is there room for the tier that is asked for, or what would the default take?"""
    room = find_room(machine.root)
    if room is None:
        return unseen("DRAM", "the kernel does not say how much memory is available")
    has = f"{room.owner} has {size(room.available)} available and keeps {size(room.reserve)}"
    if plan.config.dram_bytes is None:
        return _by_default(machine, has, on_cpu)
    wanted = plan.config.dram_bytes * plan.num_servers
    asked = size(wanted) if wanted else "none"
    if wanted and plan.num_servers > 1:
        asked += f" (dram_bytes for each of {plan.num_servers} servers)"
    if wanted <= room.usable:
        return ok("DRAM", f"{has}; {asked} wanted{'' if wanted else ' (dram_bytes = 0)'}")
    text = f"{has} of it, {asked} are wanted"
    lower = f"lower dram_bytes to {size(room.usable // plan.num_servers)}"
    total = read_keys(machine.root / "proc/meminfo").get("MemTotal", 0) * 1024
    if on_cpu:
        text += ": the CPU build's tier grows by use, and the kernel kills the server there"
        return error("DRAM", text, f"{lower}, or leave it out")
    if total and wanted > total:
        text = f"the machine has {size(total)} in all, {asked} are wanted"
        return error("DRAM", text, lower)
    if room.usable < min(FIRST_BYTES * plan.num_gpus, wanted):
        return error("DRAM", f"{text}: no DRAM tier", "lower dram_bytes, or free memory")
    return warning("DRAM", f"{text}: the tier stops growing there", "lower dram_bytes to fit")


def _by_default(machine: Machine, has: str, on_cpu: bool) -> Line:
    """What a server that starts now would take, as far as that is known before the KV cache is."""
    spare = memory.look(machine.environ, machine.root)
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


def _native(seen: NativeSeen, plan: Plan, driver: str) -> Line:
    """Does the native library load, and over which driver will it copy? "": nobody here knows."""
    cure = "install the package again"
    if seen.trouble and plan.config.dram_bytes == 0:
        return warning("native library", f"{seen.trouble} No matter without a DRAM tier", cure)
    if seen.trouble:
        return error("native library", seen.trouble, cure)
    if not driver:
        text = (
            f"loads (ABI {seen.abi}); who copies depends on the server's device, without a GPU here"
        )
        return unseen("native library", text, "run this where the server runs")
    return ok("native library", f"loads (ABI {seen.abi}) and copies over {driver}")
