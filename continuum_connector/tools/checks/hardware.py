"""Lines on the hardware, as a server started here would see it: GPUs, their driver, PCIe links and
near memory; then DRAM, the right to lock it, huge pages, and the library that copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from continuum_connector import memory
from continuum_connector.config import FIRST_BYTES
from continuum_connector.memory import Headroom, find_room, read_keys, size
from continuum_connector.tools.checks.machine import (
    CudaSeen,
    Gpu,
    Line,
    Machine,
    NativeSeen,
    VllmSeen,
    error,
    ok,
    several,
    unseen,
    warning,
)
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
UNLIMITED = "`ulimit -l unlimited`, --ulimit memlock=-1 for a container"
HUGE = "sys/kernel/mm/transparent_hugepage"
# for anonymous memory in 2 MiB pages, from Linux 6.8 on; "inherit" defers to the setting above it
HUGE_2M = f"{HUGE}/hugepages-2048kB/enabled"


def lines(machine: Machine, plan: Plan, vllm: VllmSeen, cuda: CudaSeen) -> Iterator[Line]:
    """What CUDA shows, how fast DRAM is reached, which DRAM is near, and how much there is."""
    yield from _cuda_lines(machine, plan, cuda, vllm.platform)
    links: dict[Line, list[str]] = {}  # one line per kind of link, with the GPUs that have it
    for index, gpu in enumerate(cuda.gpus):
        links.setdefault(_link_line(machine, gpu), []).append(str(index))
    for line, numbers in links.items():
        yield line._replace(text=f"GPU {', '.join(numbers)}: {line.text}")
    yield from _numa_lines(machine, plan, cuda.gpus)
    yield from _dram_lines(machine, plan, vllm, cuda)


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


# --- DRAM -------------------------------------------------------------------------------------
def _dram_lines(machine: Machine, plan: Plan, vllm: VllmSeen, cuda: CudaSeen) -> Iterator[Line]:
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
