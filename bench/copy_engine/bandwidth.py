"""GB/s by chunk size: the engine against Python's ways to copy the same blocks.

The simulator copies by memcpy, so there the engine's number is what its own work leaves of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.copy_engine.contenders import competing_thread, in_a_thread
from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, size
from bench.copy_engine.rig import Rig
from bench.copy_engine.rivals import Copy, Rivals
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.engine import Direction

WAYS = ("one copy", "engine", "thread, copy each", "thread, torch index copy")

Measured = Callable[[], float]  # returns GB/s


def measure_bandwidth(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """All ways in turn, `repeats` times, alone and beside a thread that holds the GIL."""
    section = Section(
        "bandwidth",
        f"GB/s by chunk size, {size(sizes.copied_bytes)} in shuffled order, "
        f"median of {sizes.repeats} ({machine.name})",
        ("chunk", "direction", "beside a Python thread", *WAYS, "engine / one copy"),
        note="A simulated device copies by memcpy, so there one copy is a memmove. A way that is "
        f"slow beside the competing thread is measured for {sizes.patience_s:g} s and not to its "
        "end.",
    )
    for chunk in sizes.chunks:
        say(f"bandwidth, chunks of {size(chunk)}")
        num_blocks = max(1, sizes.copied_bytes // chunk)
        rivals = machine.rivals(num_blocks, chunk)
        with Rig(machine, num_blocks, chunk) as rig:
            for direction in Direction:
                ways = _ways(rig, rivals, direction, sizes)
                for is_contended in (False, True):
                    _measure(section, rig, direction, ways, is_contended, sizes.repeats)
    return section


def _measure(
    section: Section,
    rig: Rig,
    direction: Direction,
    ways: dict[str, Measured],
    is_contended: bool,
    repeats: int,
) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with competing_thread(is_contended):
        for _ in range(repeats):
            for name, copy in ways.items():
                rates[name].append(copy())
    ratio = statistics.median(
        engine / plain for engine, plain in zip(rates["engine"], rates["one copy"], strict=True)
    )
    where = direction.name.lower()
    cells = [f"{statistics.median(rates[n]):.2f}" if n in rates else "-" for n in WAYS]
    what = (size(rig.piece_bytes), where, "yes" if is_contended else "no")
    section.rows.append((*what, *cells, f"{ratio:.2f}"))
    for name, samples in rates.items():
        beside = ", contended" if is_contended else ""
        section.samples[f"{rig.piece_bytes}, {where}, {name}{beside}"] = samples


def _ways(rig: Rig, rivals: Rivals, direction: Direction, sizes: Sizes) -> dict[str, Measured]:
    num_bytes = rig.num_blocks * rig.piece_bytes
    ids = rig.blocks, rig.slots

    def whole(copy: Copy) -> Measured:
        def run() -> int:
            copy()
            return num_bytes

        return lambda: _rate(run)

    def engine() -> float:
        done = rig.finish(direction, 0, rig.num_blocks)
        return done.bytes / (done.done_ns - done.submit_ns)

    ways = {
        "one copy": whole(lambda: rivals.one(direction)),
        "engine": engine,
        "thread, copy each": lambda: _rate(lambda: rivals.each(direction, *ids, sizes.patience_s)),
    }
    if (indexed := rivals.indexed(direction, *ids)) is not None:
        ways["thread, torch index copy"] = whole(indexed)
    return ways


def _rate(work: Callable[[], int]) -> float:
    num_bytes, seconds = in_a_thread(work)
    return num_bytes / seconds / 1e9
