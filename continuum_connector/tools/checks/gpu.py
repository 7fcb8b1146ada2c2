"""Lines on the GPUs, as a server started here would see them: driver, PCIe links, near memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from continuum_connector.tools.checks.line import (
    Line,
    error,
    listed,
    numbers_of,
    ok,
    several,
    size,
    unseen,
    warning,
)
from continuum_connector.tools.checks.machine import CudaSeen, Facts, Gpu, Machine
from continuum_connector.tools.checks.plan import Plan

BATCH_VERSION = 12080  # cuMemcpyBatchAsync, many copies in one call (csrc/cuda_types.h)
CURES = {  # what cuInit answers
    100: "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    802: "start nvidia-fabricmanager of the driver's release",
    803: "reboot, or reload the nvidia module: it is older than the libraries (or, in a container, "
    "the image brings its own libcuda)",
    804: "remove the cuda-compat libraries from LD_LIBRARY_PATH",
}
DEVICES = "sys/bus/pci/devices"
LINKED = ("GH200", "GB200", "GB300")  # NVLink connects their CPU, so our copies do not use PCIe
_SMI = "pcie.link.width.current,pcie.link.width.max,pcie.link.gen.gpumax,pcie.link.gen.hostmax"
_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # GT/s per lane
NODES = "sys/devices/system/node"


def lines(machine: Machine, plan: Plan, seen: Facts) -> Iterator[Line]:
    """What CUDA shows, how fast DRAM is reached, and which DRAM is near."""
    yield from _cuda_lines(machine, plan, seen)
    yield from _link_lines(machine, seen.cuda.gpus)
    yield from _numa_lines(machine, plan, seen.cuda.gpus)


def _cuda_lines(machine: Machine, plan: Plan, seen: Facts) -> Iterator[Line]:
    """Which GPUs, how many, which driver?"""
    cuda, platform = seen.cuda, seen.vllm.platform
    if not cuda.has_library:
        yield _none(plan, platform, cuda.trouble)
        return
    if cuda.trouble:
        text = f"the CUDA driver does not start: {cuda.trouble} ({cuda.code})"
        yield error("GPU", text, CURES.get(cuda.code, "look at nvidia-smi and dmesg"))
        return
    yield _gpus(plan, cuda)
    yield _driver(machine, cuda)
    if platform not in ("", "cuda"):
        text = f"vLLM serves on {platform}, though there is a GPU"
        yield warning("platform", text, "install the CUDA build of vLLM")


def _none(plan: Plan, platform: str, trouble: str) -> Line:
    if platform == "cpu":
        return ok("GPU", "none, and vLLM's CPU build needs none; copies run in the simulator")
    if platform not in ("", "cuda") and plan.config.dram_bytes:
        text = f"vLLM serves on {platform}, which the copy engine cannot copy from: no DRAM tier"
        return error("GPU", text, "leave dram_bytes out, or at 0: pins work without it")
    return unseen("GPU", f"no CUDA driver here ({trouble})", "run this where the server runs")


def _gpus(plan: Plan, cuda: CudaSeen) -> Line:
    names = sorted({f"{gpu.name} ({size(gpu.num_bytes)})" for gpu in cuda.gpus})
    found = f"{several('GPU', len(cuda.gpus))}: {', '.join(names)}"
    if len(cuda.gpus) < plan.num_gpus:
        text = f"the server needs {plan.num_gpus} on this node, CUDA shows {found}"
        return error("GPU", text, "lower --tensor-parallel-size, or correct CUDA_VISIBLE_DEVICES")
    return ok("GPU", found)


def _driver(machine: Machine, cuda: CudaSeen) -> Line:
    module = kernel_module(machine)
    if module and cuda.library and module != cuda.library:
        text = f"libcuda is {cuda.library}, the kernel's module {module}"
        return error("driver", text, CURES[803])
    release = f"driver {module or cuda.library}" if module or cuda.library else "driver"
    version = f"{cuda.version // 1000}.{cuda.version % 1000 // 10}"
    if cuda.version < BATCH_VERSION:
        text = (
            f"{release}, CUDA {version}: one call per copy, because it takes no batches before 12.8"
        )
        return warning("driver", text, "a driver of release 570 or later")
    return ok("driver", f"{release}, CUDA {version}: many copies in one call")


def kernel_module(machine: Machine) -> str:
    """The release of the kernel's nvidia module, "" if the kernel does not say."""
    text = machine.text("sys/module/nvidia/version")
    if text is None:
        found = re.search(
            r"\b(\d+\.\d+(\.\d+)?)\b", machine.text("proc/driver/nvidia/version") or ""
        )
        text = found[1] if found else ""
    return text


@dataclass(frozen=True)
class Link:
    """Lanes in use, lanes that the GPU has, and GT/s per lane that both GPU and slot support.

    The current speed says nothing: an idle link slows down to save power.
    """

    width: int
    max_width: int
    speed: float
    slot_speed: float

    @property
    def rate(self) -> float:
        """GB/s in one direction, before the overhead of packets."""
        speed = min(self.speed, self.slot_speed)
        coding = 0.8 if speed < 8.0 else 128 / 130
        return speed * self.width * coding / 8


def _link_lines(machine: Machine, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    """One line per kind of link, with the numbers of the GPUs that have it."""
    found: dict[Line, list[int]] = {}
    for index, gpu in enumerate(gpus):
        found.setdefault(_link_line(gpu, read_link(machine, gpu)), []).append(index)
    for line, numbers in found.items():
        yield line._replace(text=f"GPU {listed(numbers)}: {line.text}")


def read_link(machine: Machine, gpu: Gpu) -> Link | None:
    """The link as the kernel describes it, else as nvidia-smi does; None if neither does."""
    at = f"{DEVICES}/{gpu.pci_id}"
    width = machine.number(f"{at}/current_link_width") or 0
    max_width = machine.number(f"{at}/max_link_width") or 0
    speed = _speed(machine.text(f"{at}/max_link_speed"))
    if not width or not max_width or not speed:
        return _ask_smi(machine, gpu)
    above = machine.real(at).rpartition("/")[0]
    return Link(width, max_width, speed, _speed(machine.text(f"{above}/max_link_speed")) or speed)


def _ask_smi(machine: Machine, gpu: Gpu) -> Link | None:
    """The link as the driver describes it. nvidia-smi comes with each driver; nvidia-ml-py, which
    asks the same library, would be one more dependency for these four numbers."""
    words = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader", "-i", gpu.pci_id]
    cells = [each.strip() for each in (machine.run(words) or "").split(",")]
    if len(cells) != 4 or not all(each.isdecimal() for each in cells):
        return None
    width, max_width, generation, slot = map(int, cells)
    if generation not in _GENERATIONS or slot not in _GENERATIONS:
        return None
    return Link(width, max_width, _GENERATIONS[generation], _GENERATIONS[slot])


def _speed(text: str | None) -> float:
    """The number in "32.0 GT/s PCIe"; 0 if there is none."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text or "")
    return float(match[1]) if match else 0.0


def _link_line(gpu: Gpu, link: Link | None) -> Line:
    if any(name in gpu.name for name in LINKED):
        return ok("PCIe link", "its CPU is behind NVLink, faster than PCIe")
    if link is None:
        return unseen("PCIe link", "neither the kernel nor nvidia-smi says (a virtual machine?)")
    said = f"x{link.width} at {min(link.speed, link.slot_speed):g} GT/s, {link.rate:.0f} GB/s a way"
    if link.width < link.max_width:
        times = link.max_width // link.width
        text = f"{said}, of the GPU's x{link.max_width}: loads take {times} times as long"
        return warning("PCIe link", text, "another slot, a riser, or the BIOS's bifurcation")
    if link.slot_speed < link.speed:
        text = f"{said}: the GPU could do {link.speed:g} GT/s, its slot cannot"
        return warning("PCIe link", text, "another slot, or the BIOS's link speed, if it has one")
    return ok("PCIe link", said)


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
        yield from _near(machine, plan, gpus[: plan.num_gpus])


def _near(machine: Machine, plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    found = Counter(machine.number(f"sys/bus/pci/devices/{gpu.pci_id}/numa_node") for gpu in gpus)
    share = (plan.config.dram_bytes or 0) // plan.num_ranks
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
    own = numbers_of(allowed.get("Cpus_allowed_list", ""))
    if cpus and own and not cpus & own:
        text = f"this process may not run on the cores of {near}: whoever copies is far from it"
        return warning("NUMA", text, "a cpuset or numactl that includes it")
    free = free_bytes(machine, node)
    if wanted and free < wanted:
        text = f"{near} has {size(free)} free of the {size(wanted)} wanted; the rest lies far away"
        return warning("NUMA", text, "lower dram_bytes, or free that node's memory")
    return ok("NUMA", f"{near}, has {size(free)} free")


def free_bytes(machine: Machine, node: int) -> int:
    """What the node could provide: free pages, and file cache that the kernel would drop."""
    words = (machine.text(f"{NODES}/node{node}/meminfo") or "").replace(f"Node {node} ", "")
    found = {}
    for line in words.splitlines():
        key, _, rest = line.partition(":")
        found[key.strip()] = int((rest.split() or ["0"])[0])
    kept = ("MemFree", "Inactive(file)", "Active(file)")
    return 1024 * sum(found.get(key, 0) for key in kept)
