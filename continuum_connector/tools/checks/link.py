"""Lines on the PCIe links: DRAM is only as fast as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from continuum_connector.tools.checks.line import Line, listed, ok, unseen, warning
from continuum_connector.tools.checks.machine import Gpu, Machine

DEVICES = "sys/bus/pci/devices"
LINKED = ("GH200", "GB200", "GB300")  # their CPU is behind NVLink; PCIe carries nothing of ours
_SMI = "pcie.link.width.current,pcie.link.width.max,pcie.link.gen.gpumax,pcie.link.gen.hostmax"
_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # GT/s per lane


@dataclass(frozen=True)
class Link:
    """Lanes that are up, lanes the GPU has, GT/s per lane that the GPU and its slot can do.

    The speed that is up is of no use: an idle link slows down to save power.
    """

    width: int
    max_width: int
    speed: float
    slot_speed: float

    @property
    def rate(self) -> float:
        """GB/s one way, before the overhead of packets."""
        speed = min(self.speed, self.slot_speed)
        coding = 0.8 if speed < 8.0 else 128 / 130
        return speed * self.width * coding / 8


def lines(machine: Machine, gpus: tuple[Gpu, ...]) -> Iterator[Line]:
    """One line per kind of link, with the numbers of the GPUs that have it."""
    found: dict[Line, list[int]] = {}
    for index, gpu in enumerate(gpus):
        found.setdefault(_line(gpu, read_link(machine, gpu)), []).append(index)
    for line, numbers in found.items():
        yield line._replace(text=f"GPU {listed(numbers)}: {line.text}")


def read_link(machine: Machine, gpu: Gpu) -> Link | None:
    """What the kernel says of the link, else what nvidia-smi says; None where neither does."""
    at = f"{DEVICES}/{gpu.pci_id}"
    width = machine.number(f"{at}/current_link_width") or 0
    max_width = machine.number(f"{at}/max_link_width") or 0
    speed = _speed(machine.text(f"{at}/max_link_speed"))
    if not width or not max_width or not speed:
        return _ask_smi(machine, gpu)
    above = machine.real(at).rpartition("/")[0]
    return Link(width, max_width, speed, _speed(machine.text(f"{above}/max_link_speed")) or speed)


def _ask_smi(machine: Machine, gpu: Gpu) -> Link | None:
    words = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader", "-i", gpu.pci_id]
    cells = [each.strip() for each in (machine.run(words) or "").split(",")]
    if len(cells) != 4 or not all(each.isdecimal() for each in cells):
        return None
    width, max_width, generation, slot = map(int, cells)
    if generation not in _GENERATIONS or slot not in _GENERATIONS:
        return None
    return Link(width, max_width, _GENERATIONS[generation], _GENERATIONS[slot])


def _speed(text: str | None) -> float:
    """GT/s of "32.0 GT/s PCIe"; 0 if it does not say."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text or "")
    return float(match[1]) if match else 0.0


def _line(gpu: Gpu, link: Link | None) -> Line:
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
