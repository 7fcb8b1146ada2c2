"""A machine of a test's own, for continuum_connector/tools/checks: files, environment, answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from continuum_connector.tools.checks import Line, Verdict
from continuum_connector.tools.checks.machine import Machine
from continuum_connector.tools.cli.check import look

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
    "mends_drafted_states": True,
}
# What vLLM makes of a Llama with 32 layers of 8 heads; planned.py has the same fields.
KV: dict[str, Any] = {
    "device": "sm_90",
    "architecture": "LlamaForCausalLM",
    "aside": "",
    "no_tier": "",
    "no_disk": "",
    "layers": [["FullAttentionSpec", None, 32]],
    "groups": [["FullAttentionSpec", 16, None]],
    "block_bytes": 32 * 16 * 4096,
    "num_ranks": 1,
    "prefix_caching": True,
    "drops_a_block": False,
    "server": {},
}
H100 = {"name": "NVIDIA H100 80GB HBM3", "pci_id": GPU_ID, "num_bytes": 80 * GIB}
CUDA = {"has_library": True, "version": 12080, "gpus": [H100]}
NATIVE = {"abi": 4}
DISK = {
    "place": "/kv",
    "exists": True,
    "mode": 0o700,
    "num_bytes": 4000 * GIB,
    "free_bytes": 3900 * GIB,
}
FILES = {
    "proc/meminfo": "MemTotal: 268435456 kB\nMemAvailable: 209715200 kB\n",  # 256, 200 GiB
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Cpus_allowed_list:\t0-15\nMems_allowed_list:\t0-1\n",
    "sys/module/nvidia/version": "570.86.15",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemFree: 100000000 kB\n",
    "sys/devices/system/node/online": "0",
    f"{PCI}/current_link_width": "16",
    f"{PCI}/max_link_width": "16",
    f"{PCI}/max_link_speed": "32.0 GT/s PCIe",
    f"{PCI}/current_link_speed": "2.5 GT/s PCIe",
    f"{PCI}/numa_node": "0",
    f"{BRIDGE}/max_link_speed": "32.0 GT/s PCIe",
    "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
    "23 22 259:1 / /kv rw shared:5 - xfs /dev/nvme0n1p1 rw",
}


def make(
    root: Path,
    files: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    vllm: Mapping[str, Any] | None = None,
    cuda: Mapping[str, Any] | None = None,
    native: Mapping[str, Any] | None = None,
    disk: Mapping[str, Any] | None = None,
    plugins: Mapping[str, str] | None = None,
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
        "vllm": vllm or {},
        "cuda": CUDA if cuda is None else cuda,
        "native": NATIVE if native is None else native,
        "disk": {**DISK, **(disk or {})},
    }

    def ask(about: str, *words: str) -> dict[str, Any]:
        if about == "vllm" and vllm is None:
            is_there = any((Path(word) / "config.json").is_file() for word in words)
            caches = "--no-enable-prefix-caching" not in words
            return VLLM | ({"kv": KV | {"prefix_caching": caches}} if is_there else {})
        return dict(answers[about])

    return Machine(
        root,
        environ or {},
        ask,
        {"continuum": "continuum_connector.vllm.plugin:register"} if plugins is None else plugins,
    )


def one(machine: Machine, plan: Any, subject: str) -> Line:
    """The line on a subject, of the whole check."""
    found = [line for line in look(machine, plan) if line.subject == subject]
    assert len(found) == 1, found
    return found[0]


def none_but_ok(lines: list[Line]) -> None:
    assert [line for line in lines if line.verdict is not Verdict.OK] == []


def replace_ask(machine: Machine, asked: list[str]) -> Machine:
    """The same machine, which writes down whom it asks."""

    def ask(module: str, *words: str) -> dict[str, Any]:
        asked.append(module)
        return machine.ask(module, *words)

    return replace(machine, ask=ask)
