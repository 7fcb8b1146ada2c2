"""What was told by those whom `Machine.ask` asked: vLLM, the CUDA driver, our native library."""

from __future__ import annotations

import msgspec

from continuum_connector.checks.machine import Machine


class VllmSeen(msgspec.Struct, frozen=True):
    """The vLLM of this Python. `trouble`: why it cannot be imported; the rest is from compat.py."""

    is_installed: bool = False
    trouble: str = ""
    plugin_trouble: str = ""
    version: str = ""
    tested: tuple[str, ...] = ()
    platform: str = ""  # cuda, rocm, cpu, ...; "" where vLLM found no device
    has_layouts: bool = False
    fails_by_request: bool = False
    may_starve: bool = False


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that CUDA shows to this process. `pci_id`: as in /sys/bus/pci/devices."""

    name: str
    pci_id: str
    num_bytes: int = 0


class CudaSeen(msgspec.Struct, frozen=True):
    """libcuda. `version`: of CUDA, 12080 is 12.8; `library`: the driver's release; `code`: what
    cuInit answered."""

    has_library: bool = False
    trouble: str = ""
    library: str = ""
    version: int = 0
    code: int = 0
    gpus: tuple[Gpu, ...] = ()


class NativeSeen(msgspec.Struct, frozen=True):
    """Our native library. `trouble`: why it cannot be loaded or opened."""

    trouble: str = ""
    path: str = ""
    abi: int = 0


class Seen:
    """The three answers, asked for once."""

    def __init__(self, machine: Machine) -> None:
        self.vllm = msgspec.convert(machine.ask("ask_vllm"), VllmSeen)
        self.cuda = msgspec.convert(machine.ask("ask_cuda"), CudaSeen)
        self.native = msgspec.convert(machine.ask("ask_native"), NativeSeen)
