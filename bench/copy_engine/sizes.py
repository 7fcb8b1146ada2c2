"""How much is measured: the numbers behind --quick and --help."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Counts of samples, and bytes moved."""

    # Submit, poll, cancel.
    blocks: tuple[int, ...] = (1, 64, 1024)
    regions: tuple[int, ...] = (1, 64)
    calls: int = 300
    # Hand-over beside a busy step loop.
    steps: int = 300
    step_s: float = 0.015
    handed_blocks: int = 1024
    handed_bytes: int = 16 * KIB  # per block
    # Device.
    chunks: tuple[int, ...] = (4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 512 * KIB, 2 * MIB)
    repeats: int = 5
    peak_bytes: int = 1024 * MIB
    counts: tuple[int, ...] = (16, 256, 2048, 8192)  # blocks of a transfer
    sweep_bytes: int = 2048 * MIB  # no transfer is longer
    fed_s: float = 1.0  # how long the engine is kept at work
    work_units: int = 400  # queued at a time
    arm_s: float = 1.0  # of work beside one kind of transfers, per turn
    decode_bytes: int = 512 * MIB  # that such transfers go over
    small_pieces: tuple[int, ...] = (16 * KIB, 32 * KIB)  # below and above the bound in csrc/path.h
    small_pieces_per_block: int = 64  # K and V of 32 layers


FULL = Sizes()
QUICK = Sizes(
    calls=100,
    steps=60,
    repeats=3,
    peak_bytes=256 * MIB,
    counts=(16, 1024),
    sweep_bytes=512 * MIB,
    fed_s=0.3,
    work_units=100,
    arm_s=0.3,
    decode_bytes=256 * MIB,
)
