"""What transfers at full rate take from a step's kernels, by the way they go to the driver.

Large pieces cross by the copy engines, which take memory bandwidth only. Small pieces of loads go
by a kernel of ours (`csrc/path.h`), which takes processors too: both are measured, and small
pieces also without the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from dataclasses import dataclass

from bench.copy_engine.device_rates import BOTH, PATHS, fed
from bench.copy_engine.machine import Machine, Stream
from bench.copy_engine.report import Say, Section, size, spread
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.abi import Direction

WARM_UP = 5  # units that are not counted
LOAD, STORE = (Direction.LOAD,), (Direction.STORE,)


@dataclass(frozen=True)
class Arm:
    """Transfers beside the work; without directions there are none."""

    name: str
    directions: tuple[Direction, ...] = ()
    piece_bytes: int = 0
    path: str = "auto"


def arms_of(sizes: Sizes) -> list[Arm]:
    """Nothing, large pieces, small ones with the kernel and without, and nothing again."""
    large = sizes.chunks[-1]
    arms = [Arm("none")]
    for name, ways in (("loads", LOAD), ("stores", STORE), ("both", BOTH)):
        arms.append(Arm(f"{name}, pieces of {size(large)}", ways, large))
    for small, path in itertools.product(sizes.small_pieces, ("gather", "batch")):
        for name, ways in (("loads", LOAD), ("stores", STORE)):
            arms.append(
                Arm(f"{name}, pieces of {size(small)}, {path} asked for", ways, small, path)
            )
    return [*arms, Arm("none, again")]


def measure_decode(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """Memory-bound products beside each arm's transfers; the arms take turns."""
    stream = Stream(machine)
    section = Section(
        "decode",
        "Decode-like products beside transfers at full rate, ms per unit "
        f"({sizes.repeats} turns of {sizes.arm_s:g} s each)",
        ("transfers", "path", "median", "p99", "max", "slow-down", "worst turn", "GB/s"),
        note="Units are queued ahead, so the caller's time is not in them. Slow-down: median unit "
        "by that of `none` in the same turn; its median over the turns. Path: what was taken.",
    )
    arms = arms_of(sizes)
    found: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    with contextlib.ExitStack() as stack:
        rigs = {arm: stack.enter_context(_rig(machine, sizes, arm)) for arm in arms}
        for turn in range(sizes.repeats):
            for arm in arms:
                say(f"decode-like work, turn {turn + 1} of {sizes.repeats}, transfers: {arm.name}")
                with fed(rigs[arm], arm.directions) as meter:
                    found[arm.name].append(_work(stream, sizes))
                    rates[arm.name].append(meter.rate())
        paths = {arm.name: _paths_taken(rigs[arm]) for arm in arms}
    for arm_name, turns in found.items():
        _add(section, arm_name, paths[arm_name], turns, found["none"], rates[arm_name])
    return section


def _add(
    section: Section,
    name: str,
    path: str,
    turns: list[list[float]],
    nothing: list[list[float]],
    rates: list[float],
) -> None:
    """A row; ratios are taken turn by turn."""
    ratios = [
        statistics.median(units) / statistics.median(none)
        for units, none in zip(turns, nothing, strict=True)
    ]
    every = list(itertools.chain.from_iterable(turns))
    slower = (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}")
    section.rows.append((name, path, *spread(every), *slower, f"{statistics.median(rates):.1f}"))
    section.samples[name], section.samples[f"{name}, slow-down"] = every, ratios


def _rig(machine: Machine, sizes: Sizes, arm: Arm) -> Rig:
    """Memory for one arm: large pieces alone in their blocks, small ones one per layer."""
    if not arm.directions:
        return Rig(machine, 1, sizes.chunks[-1])
    is_small = arm.piece_bytes in sizes.small_pieces
    num_pieces = sizes.small_pieces_per_block if is_small else 1
    block_bytes = arm.piece_bytes * num_pieces
    num_blocks = max(6, sizes.decode_bytes // block_bytes)
    return Rig(machine, num_blocks, arm.piece_bytes, num_pieces, path=arm.path)


def _paths_taken(rig: Rig) -> str:
    trunks = rig.engine.stats().num_trunks
    return ", ".join(name for name, bit in PATHS.items() if any(way[bit] for way in trunks)) or "-"


def _work(stream: Stream, sizes: Sizes) -> list[float]:
    """Milliseconds of each unit, for as long as a turn is."""
    end, found = time.perf_counter() + sizes.arm_s, []
    while not found or time.perf_counter() < end:
        found += _units(stream, sizes.work_units)
    return found


def _units(stream: Stream, count: int) -> list[float]:
    for _ in range(WARM_UP):
        stream.work()
    events = [stream.record()]
    for _ in range(count):
        stream.work()
        events.append(stream.record())
    stream.synchronize()
    return [earlier.elapsed_time(later) for earlier, later in itertools.pairwise(events)]
