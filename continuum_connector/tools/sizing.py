"""Sizing: how much DRAM and disk a server's agents need, from what they do. Arithmetic only.

    live programs = given, or arrivals/s x turns x (gap + turn)     (Little)
    live KV       = live programs x KV of a context
    DRAM          = live KV / 0.8, unless 0.8 of VRAM's KV space holds it
    disk          = live KV / 0.8, unless 0.8 of the given DRAM holds it

DRAM must hold all of the live KV, because a pinned turn is also in DRAM by the time its pin ends.
So must the disk: the program that is away longest leaves DRAM, and sooner or later that is every
program. 0.8 is where hits collapse in measurements of full tiers: 0.75 to 0.87 of what they hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY_S = 86_400
FILL = 0.8  # of a tier; if it is fuller, KV leaves that is needed again
_P90 = 1.2815515655446004  # of the standard normal distribution


@dataclass(frozen=True)
class Load:
    """What agents do, in seconds and tokens. `arrivals`: programs per second.

    `programs`: how many are alive at once; 0 derives it from `arrivals`.
    """

    context: int
    new_tokens: int
    gap_s: float  # mean time between two turns
    turn_s: float  # mean time of a turn, from its arrival to its last token
    programs: float = 0.0
    arrivals: float = 0.0
    turns: float = 0.0

    @property
    def live(self) -> float:
        """Programs that are alive at once."""
        return self.programs or self.arrivals * self.turns * (self.gap_s + self.turn_s)

    @property
    def turns_per_s(self) -> float:
        """Turns that all programs together begin per second."""
        return self.live / (self.gap_s + self.turn_s)


@dataclass(frozen=True)
class Place:
    """Where it runs. `context_bytes`: KV of one context over all GPUs. `new_bytes`: KV of the
    tokens that a turn adds. `vram_bytes`: KV space of one of `num_gpus`. `pcie`: bytes per second
    of its link."""

    context_bytes: float
    new_bytes: float
    vram_bytes: float
    num_gpus: int
    pcie: float


@dataclass(frozen=True)
class Need:
    """What follows, in bytes, and bytes per second for each GPU. `share_vram`: of the live KV."""

    live_bytes: float
    num_in_vram: int
    share_vram: float
    dram_bytes: float
    loads: float
    stores: float
    load_s: float
    is_too_fast: bool


@dataclass(frozen=True)
class Overflow:
    """What a disk below `dram_bytes` would have to do, in bytes per second of the node's drive.
    `share`: the share of turns whose KV is not in DRAM. `tokens`: prompt tokens per second that are
    read instead of computed. `written`: at most so many bytes per day, as each is written once."""

    share: float
    disk_bytes: float
    reads: float
    read_s: float
    tokens: float
    written: float
    is_too_slow: bool


def mean_gap(median_s: float, p90_s: float) -> float:
    """The mean of a log-normal gap with this median and 90th percentile.

    Real gaps have a heavier tail, because people go away. The KV of those may leave.
    """
    sigma = math.log(max(p90_s / median_s, 1.0)) / _P90
    return median_s * math.exp(sigma * sigma / 2)


def need(load: Load, place: Place) -> Need:
    """The DRAM that this load needs, and the rates on each GPU's link with so much of it."""
    live = load.live * place.context_bytes
    vram = place.vram_bytes * place.num_gpus
    share = min(1.0, vram / live) if live else 1.0
    dram = 0.0 if live <= FILL * vram else live / FILL
    away = load.turns_per_s * (1.0 - share) if dram else 0.0  # turns per second that must load
    loads = away * place.context_bytes / place.num_gpus
    stores = load.turns_per_s * place.new_bytes / place.num_gpus if dram else 0.0
    return Need(
        live_bytes=live,
        num_in_vram=int(vram // place.context_bytes),
        share_vram=share,
        dram_bytes=dram,
        loads=loads,
        stores=stores,
        load_s=place.context_bytes / place.num_gpus / place.pcie,
        is_too_fast=loads > FILL * place.pcie,
    )


def overflow(load: Load, place: Place, dram_bytes: float, drive: float) -> Overflow:
    """What is left to a drive of so many bytes per second if there is only so much DRAM."""
    live = load.live * place.context_bytes
    held = FILL * max(dram_bytes, place.vram_bytes * place.num_gpus)
    share = max(0.0, 1.0 - held / live) if live else 0.0
    away = load.turns_per_s * share
    reads = away * place.context_bytes
    return Overflow(
        share=share,
        disk_bytes=live / FILL if share else 0.0,
        reads=reads,
        read_s=place.context_bytes / drive,
        tokens=away * load.context,
        written=load.turns_per_s * place.new_bytes * DAY_S if share else 0.0,
        is_too_slow=reads > FILL * drive,
    )
