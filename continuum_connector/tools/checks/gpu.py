"""Lines on the GPUs, as a server started here would see them: driver, PCIe links, near memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from continuum_connector.memory import size
from continuum_connector.tools.checks.line import Line, error, ok, several, unseen, warning
from continuum_connector.tools.checks.machine import CudaSeen, Gpu, Machine, VllmSeen
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
_SMI = "pcie.link.width.current,pcie.link.width.max,pcie.link.gen.gpumax,pcie.link.gen.hostmax"
_GENERATIONS = {"1": 2.5, "2": 5.0, "3": 8.0, "4": 16.0, "5": 32.0, "6": 64.0}  # GT/s per lane


def lines(machine: Machine, plan: Plan, vllm: VllmSeen, cuda: CudaSeen) -> Iterator[Line]:
    """What CUDA shows, how fast DRAM is reached, and which DRAM is near."""
    yield from _cuda_lines(machine, plan, cuda, vllm.platform)
    links: dict[Line, list[str]] = {}  # one line per kind of link, with the GPUs that have it
    for index, gpu in enumerate(cuda.gpus):
        links.setdefault(_link_line(machine, gpu), []).append(str(index))
    for line, numbers in links.items():
        yield line._replace(text=f"GPU {', '.join(numbers)}: {line.text}")
    yield from _numa_lines(machine, plan, cuda.gpus)


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
        yield _gpus(plan, cuda)
        yield _driver(machine, cuda)
        if is_other:
            text = f"vLLM serves on {platform}, though there is a GPU"
            yield warning("platform", text, "install the CUDA build of vLLM")


def _gpus(plan: Plan, cuda: CudaSeen) -> Line:
    names = sorted({f"{gpu.name} ({size(gpu.num_bytes)})" for gpu in cuda.gpus})
    found = f"{several('GPU', len(cuda.gpus))}: {', '.join(names)}"
    if len(cuda.gpus) < plan.num_gpus:
        text = f"the server needs {plan.num_gpus} on this node, CUDA shows {found}"
        return error("GPU", text, "lower --tensor-parallel-size, or correct CUDA_VISIBLE_DEVICES")
    return ok("GPU", found)


def _driver(machine: Machine, cuda: CudaSeen) -> Line:
    said = machine.text("proc/driver/nvidia/version") or ""
    module = machine.text("sys/module/nvidia/version")  # the release of the kernel's module
    if module is None:
        module = next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", said)), "of an unknown release")
    text = f"driver {module}, CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}"
    if cuda.version < BATCH_VERSION:
        text = f"{text}: one call per copy, because it takes no batches before 12.8"
        return warning("driver", text, "a driver of release 570 or later")
    return ok("driver", f"{text}: many copies in one call")


# --- the link ---------------------------------------------------------------------------------
# Lanes in use, lanes that the GPU has, GT/s per lane of the GPU and of its slot. The current speed
# says nothing: an idle link slows down to save power.
Link = tuple[int, int, float, float]


def _link_line(machine: Machine, gpu: Gpu) -> Line:
    if any(name in gpu.name for name in LINKED):
        return ok("PCIe link", "its CPU is behind NVLink, faster than PCIe")
    if (link := _read_link(machine, gpu)) is None:
        return unseen("PCIe link", "neither the kernel nor nvidia-smi says (a virtual machine?)")
    width, max_width, own_speed, slot_speed = link
    speed = min(own_speed, slot_speed)
    rate = speed * width * (0.8 if speed < 8.0 else 128 / 130) / 8  # before packets' overhead
    said = f"x{width} at {speed:g} GT/s, {rate:.0f} GB/s a way"
    if width < max_width:
        times = max_width // width
        text = f"{said}, of the GPU's x{max_width}: loads take {times} times as long"
        return warning("PCIe link", text, "another slot, a riser, or the BIOS's bifurcation")
    if slot_speed < own_speed:
        text = f"{said}: the GPU could do {own_speed:g} GT/s, its slot cannot"
        return warning("PCIe link", text, "another slot, or the BIOS's link speed, if it has one")
    return ok("PCIe link", said)


def _read_link(machine: Machine, gpu: Gpu) -> Link | None:
    """The link as the kernel describes it, else as nvidia-smi does; None if neither does. It comes
    with each driver; nvidia-ml-py, which asks the same library, would be one more dependency for
    these four numbers."""
    at = f"{DEVICES}/{gpu.pci_id}"
    width = machine.number(f"{at}/current_link_width")
    max_width = machine.number(f"{at}/max_link_width")
    speed = _speed(machine, at)
    if width and max_width and speed:
        above = machine.real(at).rpartition("/")[0]
        return width, max_width, speed, _speed(machine, above) or speed
    words = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader", "-i", gpu.pci_id]
    cells = [each.strip() for each in (machine.run(words) or "").split(",")]
    if len(cells) != 4 or not all(map(str.isdecimal, cells)) or not {*cells[2:]} <= {*_GENERATIONS}:
        return None
    return int(cells[0]), int(cells[1]), _GENERATIONS[cells[2]], _GENERATIONS[cells[3]]


def _speed(machine: Machine, device: str) -> float:
    """The number in "32.0 GT/s PCIe"; 0 if there is none."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", machine.text(f"{device}/max_link_speed") or "")
    return float(match[1]) if match else 0.0


# --- near memory ------------------------------------------------------------------------------
def _numa_lines(machine: Machine, plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
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
    if node not in _numbers(allowed.get("Mems_allowed_list", str(node))):
        text = f"this process may not use the memory of {near}: every copy crosses the sockets"
        return warning("NUMA", text, "a cpuset or numactl that includes it")
    cpus = _numbers(machine.text(f"{NODES}/node{node}/cpulist") or "")
    own = _numbers(allowed.get("Cpus_allowed_list", ""))
    if cpus and own and not cpus & own:
        text = f"this process may not run on the cores of {near}: whoever copies is far from it"
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
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found
