"""A machine of a test's own, for continuum_connector/checks: files, environment, answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from continuum_connector.tools.checks.line import Line, Verdict
from continuum_connector.tools.checks.machine import Machine
from continuum_connector.tools.checks.run import check

GIB = 2**30
GPU_ID = "0000:01:00.0"
BRIDGE = "sys/devices/pci0000:00/0000:00:01.0"
PCI = f"{BRIDGE}/{GPU_ID}"

VLLM = {
    "is_installed": True,
    "version": "0.32.0",
    "tested": ["0.26.0", "0.33.0"],
    "platform": "cuda",
    "has_layouts": True,
    "fails_by_request": True,
}
H100 = {"name": "NVIDIA H100 80GB HBM3", "pci_id": GPU_ID, "num_bytes": 80 * GIB}
CUDA = {"has_library": True, "version": 12080, "library": "570.86.15", "gpus": [H100]}
NATIVE = {"path": "/lib/libckv.so", "abi": 2}
FILES = {
    "proc/meminfo": "MemTotal: 268435456 kB\nMemAvailable: 209715200 kB\n",  # 256, 200 GiB
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Cpus_allowed_list:\t0-15\nMems_allowed_list:\t0-1\n",
    "sys/module/nvidia/version": "570.86.15",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemFree: 100000000 kB\n",
    "sys/devices/system/node/online": "0",
    f"{PCI}/current_link_width": "16",
    f"{PCI}/max_link_width": "16",
    f"{PCI}/max_link_speed": "32.0 GT/s PCIe",
    f"{PCI}/current_link_speed": "2.5 GT/s PCIe",
    f"{PCI}/numa_node": "0",
    f"{BRIDGE}/max_link_speed": "32.0 GT/s PCIe",
}


def make(
    root: Path,
    files: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    vllm: Mapping[str, Any] | None = None,
    cuda: Mapping[str, Any] | None = None,
    native: Mapping[str, Any] | None = None,
    smi: str | None = None,
    plugins: Mapping[str, str] | None = None,
    memlock: int | None = None,
) -> Machine:
    """A server with one H100 where nothing is wrong, but for what is given; a file None is gone."""
    for path, text in {**FILES, **(files or {})}.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
    link = root / "sys/bus/pci/devices" / GPU_ID
    link.parent.mkdir(parents=True, exist_ok=True)
    (root / PCI).mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / PCI)
    answers = {
        "ask_vllm": VLLM if vllm is None else vllm,
        "ask_cuda": CUDA if cuda is None else cuda,
        "ask_native": NATIVE if native is None else native,
    }
    return Machine(
        root,
        environ or {},
        lambda module, *_words: dict(answers[module]),
        lambda _words: smi,
        {"continuum": "continuum_connector.vllm.plugin:register"} if plugins is None else plugins,
        memlock,
    )


def one(machine: Machine, plan: Any, subject: str) -> Line:
    """The line on a subject, of the whole check."""
    found = [line for line in check(machine, plan) if line.subject == subject]
    assert len(found) == 1, found
    return found[0]


def none_but_ok(lines: list[Line]) -> None:
    assert [line for line in lines if line.verdict is not Verdict.OK] == []
