"""What transfers do to a step's own small copies: how long one waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.copy_engine.feeder import fed
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, size, spread
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import KIB, Sizes
from continuum_connector.worker.engine import Direction

SMALL = 4 * KIB
WARM_UP = 5  # calls that are not counted


def measure_small_copy(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """A small page-locked copy to VRAM on another stream, beside bulk loads."""
    section = Section(
        "small_copy",
        f"Copy of {size(SMALL)} to VRAM on another stream, us from call to end",
        ("trunk", "trunks in flight", "median", "p99", "max", "bulk loads, GB/s"),
        note="First row: no bulk loads. Trunk and window bound what a step's copy waits for.",
    )
    chunk = sizes.chunks[-1]
    num_blocks = max(3, sizes.peak_bytes // chunk)
    copy = small_copy(machine)

    def samples() -> list[float]:
        return [copy() for _ in range(WARM_UP + sizes.small_copies)][WARM_UP:]

    section.samples["idle"] = samples()
    section.rows.append(("-", "-", *spread(section.samples["idle"]), "0.0"))
    for trunk in sizes.trunks:
        for window in sizes.windows:
            say(f"small copy, {window} trunks of {size(trunk)}")
            tuning = {"trunk_bytes": trunk, "window_bytes": trunk * window}
            with (
                Rig(machine, num_blocks, chunk, **tuning) as rig,
                fed(rig, (Direction.LOAD,)) as meter,
            ):
                found = samples()
                rate = meter.rate()
            section.rows.append((size(trunk), str(window), *spread(found), f"{rate:.1f}"))
            section.samples[f"{trunk}, {window}"] = found
    return section


def small_copy(machine: Machine) -> Callable[[], float]:
    """A step's own copy; it returns microseconds from call to end."""
    host, vram, stream = machine.host(SMALL), machine.vram(SMALL), machine.stream()

    def copy() -> float:
        began = time.perf_counter()
        stream.copy(vram, host, SMALL)
        stream.synchronize()
        return (time.perf_counter() - began) * 1e6

    return copy
