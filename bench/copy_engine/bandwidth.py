"""GB/s by chunk size: the engine over the simulator against Python's ways to copy memory.

The simulator copies by memcpy, so the engine's number is what its own work leaves of a memcpy.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

from bench.copy_engine.contenders import (
    addresses,
    competing_thread,
    in_a_thread,
    memmove_each,
)
from bench.copy_engine.machine import CpuBuffer, CpuMachine
from bench.copy_engine.report import Section, size
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.engine import Direction

WAYS = ("one memmove", "engine", "thread, memmove each", "thread, torch index copy")

Say = Callable[[str], None]
Copy = Callable[[], float]  # returns GB/s


def measure_bandwidth(sizes: Sizes, say: Say) -> Section:
    """All ways in turn, `repeats` times, alone and beside a thread that holds the GIL."""
    section = Section(
        "bandwidth",
        f"GB/s by chunk size, {size(sizes.copied_bytes)} in shuffled order, "
        f"median of {sizes.repeats}",
        ("chunk", "direction", "beside a Python thread", *WAYS, "engine / one memmove"),
        note="The simulated device copies by memcpy. A way that is slow beside the competing "
        f"thread is measured for {sizes.patience_s:g} s and not to its end.",
    )
    for chunk in sizes.chunks:
        say(f"bandwidth, chunks of {size(chunk)}")
        with Rig(CpuMachine(), max(1, sizes.copied_bytes // chunk), chunk) as rig:
            for direction in Direction:
                ways = _ways(rig, direction, sizes)
                for is_contended in (False, True):
                    _measure(section, rig, direction, ways, is_contended, sizes.repeats)
    return section


def _measure(
    section: Section,
    rig: Rig,
    direction: Direction,
    ways: dict[str, Copy],
    is_contended: bool,
    repeats: int,
) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with competing_thread(is_contended):
        for _ in range(repeats):
            for name, copy in ways.items():
                rates[name].append(copy())
    ratio = statistics.median(
        engine / plain for engine, plain in zip(rates["engine"], rates["one memmove"], strict=True)
    )
    where = direction.name.lower()
    cells = [f"{statistics.median(rates[n]):.2f}" if n in rates else "-" for n in WAYS]
    what = (size(rig.piece_bytes), where, "yes" if is_contended else "no")
    section.rows.append((*what, *cells, f"{ratio:.2f}"))
    for name, samples in rates.items():
        beside = ", contended" if is_contended else ""
        section.samples[f"{rig.piece_bytes}, {where}, {name}{beside}"] = samples


def _ways(rig: Rig, direction: Direction, sizes: Sizes) -> dict[str, Copy]:
    vram, pool = rig.vram.address, rig.engine.pool.base
    num_bytes = rig.num_blocks * rig.piece_bytes
    ends = [
        addresses(vram, rig.blocks, rig.piece_bytes),
        addresses(pool, rig.slots, rig.piece_bytes),
    ]
    if direction is Direction.STORE:
        (to, at), (dst, src) = (pool, vram), (ends[1], ends[0])
    else:
        (to, at), (dst, src) = (vram, pool), (ends[0], ends[1])

    def plain() -> int:
        ctypes.memmove(to, at, num_bytes)
        return num_bytes

    def engine() -> float:
        done = rig.finish(direction, 0, rig.num_blocks)
        return done.bytes / (done.done_ns - done.submit_ns)

    ways: dict[str, Copy] = {
        "one memmove": lambda: _rate(plain),
        "engine": engine,
        "thread, memmove each": lambda: _rate(
            lambda: memmove_each(dst, src, rig.piece_bytes, sizes.patience_s)
        ),
    }
    if (torch_copy := _torch_copy(rig, direction)) is not None:
        ways["thread, torch index copy"] = lambda: _rate(torch_copy)
    return ways


def _rate(work: Callable[[], int]) -> float:
    num_bytes, seconds = in_a_thread(work)
    return num_bytes / seconds / 1e9


def _torch_copy(rig: Rig, direction: Direction) -> Callable[[], int] | None:
    """None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    assert isinstance(rig.vram, CpuBuffer)
    shape = (rig.num_blocks, rig.piece_bytes)
    ends = [
        (torch.from_numpy(rig.vram.array).view(shape), torch.from_numpy(rig.blocks).long()),
        (torch.from_numpy(rig.engine.pool.view()).view(shape), torch.from_numpy(rig.slots).long()),
    ]
    (src, at), (dst, to) = ends if direction is Direction.STORE else reversed(ends)

    def copy() -> int:
        dst.index_copy_(0, to, src.index_select(0, at))
        return rig.num_blocks * rig.piece_bytes

    return copy
