"""A prior of what a prefill takes: data sheets, until engine steps show what it does take.

It is right to a factor of two or three, which is enough to tell a turn that is worth keeping from
one that is not. A device that nobody knows counts as a slow one: computing then looks dear, so
turns are kept, as the paper's cold start keeps them, and pins yield to whoever needs the room.
"""

from __future__ import annotations

import re
from typing import NamedTuple

EFFICIENCY = 0.5  # of a data sheet's products that a prefill reaches; measured ones do 0.4 to 0.7
STEP_S = 5e-3  # of each step, whatever it computes: scheduling, launches, sampling


class Device(NamedTuple):
    """`flops`: dense 16-bit products per second; `memory_rate`: bytes per second."""

    flops: float
    memory_rate: float


class Shape(NamedTuple):
    """One rank's share of a model: operations per token, operations of attention per token and
    token before it, bytes of weights that a step reads."""

    token_flops: float
    pair_flops: float
    weight_bytes: float


# A part of the device's name -> its data sheet.
KNOWN = {
    "T4": Device(65e12, 0.32e12),
    "V100": Device(125e12, 0.9e12),
    "A10": Device(125e12, 0.6e12),
    "A10G": Device(70e12, 0.6e12),
    "A30": Device(165e12, 0.93e12),
    "A40": Device(150e12, 0.7e12),
    "A100": Device(312e12, 1.9e12),
    "A800": Device(312e12, 1.9e12),
    "3090": Device(71e12, 0.94e12),
    "4090": Device(165e12, 1.0e12),
    "5090": Device(210e12, 1.8e12),
    "L4": Device(121e12, 0.3e12),
    "L20": Device(119e12, 0.86e12),
    "L40": Device(181e12, 0.86e12),
    "L40S": Device(362e12, 0.86e12),
    "H20": Device(148e12, 4.0e12),
    "H100": Device(989e12, 3.35e12),
    "H800": Device(989e12, 3.35e12),
    "GH200": Device(989e12, 4.0e12),
    "H200": Device(989e12, 4.8e12),
    "B200": Device(2250e12, 8.0e12),
    "GB200": Device(2250e12, 8.0e12),
    "B300": Device(2250e12, 8.0e12),
    "GB300": Device(2250e12, 8.0e12),
    "MI250X": Device(190e12, 1.6e12),  # one of its two halves, which are devices of their own
    "MI300X": Device(1307e12, 5.3e12),
    "MI325X": Device(1307e12, 6.0e12),
    "MI350X": Device(2300e12, 8.0e12),
    "MI355X": Device(2500e12, 8.0e12),
}
# CUDA compute capability, major -> the slowest of those that serve models, for names not above.
GENERATIONS = {
    7: KNOWN["T4"],
    8: KNOWN["A10G"],
    9: KNOWN["H20"],
    10: KNOWN["B200"],
    12: KNOWN["5090"],
}
UNKNOWN = KNOWN["T4"]
CORE = Device(50e9, 10e9)  # of a CPU: 16 products a cycle; its share of the memory's rate
# A model of which vLLM cannot say what it computes: 8 billion parameters in 16 bits.
TYPICAL = Shape(16e9, 0.5e6, 16e9)


def device_named(name: str, generation: int | None = None) -> Device:
    """The device that vLLM calls `name`. `generation`: its CUDA capability's major number."""
    for word in re.split(r"[^A-Za-z0-9]+", name):
        if word.upper() in KNOWN:
            return KNOWN[word.upper()]
    return UNKNOWN if generation is None else GENERATIONS.get(generation, UNKNOWN)


def cpu(num_cores: int) -> Device:
    """A CPU of so many cores."""
    return Device(num_cores * CORE.flops, num_cores * CORE.memory_rate)


def prefill_prior(shape: Shape, device: Device) -> tuple[float, float, float]:
    """Seconds that a prefill takes: per step, per token, per token and token before it."""
    flops = device.flops * EFFICIENCY
    base = STEP_S + shape.weight_bytes / device.memory_rate
    return base, shape.token_flops / flops, shape.pair_flops / flops
