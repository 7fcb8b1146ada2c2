"""Lines on the GPUs and their driver, as CUDA would show them to a server started here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from continuum_connector.tools.checks.line import Line, error, ok, several, size, unseen, warning
from continuum_connector.tools.checks.machine import CudaSeen, Facts, Machine
from continuum_connector.tools.checks.plan import Plan

BATCH_VERSION = 12080  # cuMemcpyBatchAsync, many copies in one call (csrc/cuda_types.h)
CURES = {  # what cuInit answers
    100: "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    802: "start nvidia-fabricmanager of the driver's release",
    803: "reboot, or reload the nvidia module: it is older than the libraries (or, in a container, "
    "the image brings its own libcuda)",
    804: "remove the cuda-compat libraries from LD_LIBRARY_PATH",
}


def lines(machine: Machine, plan: Plan, seen: Facts) -> Iterator[Line]:
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
        return error("GPU", text, "leave dram_bytes at 0: pins work without it")
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
    """The release of the kernel's nvidia module, "" if it does not say."""
    text = machine.text("sys/module/nvidia/version")
    if text is None:
        found = re.search(
            r"\b(\d+\.\d+(\.\d+)?)\b", machine.text("proc/driver/nvidia/version") or ""
        )
        text = found[1] if found else ""
    return text
