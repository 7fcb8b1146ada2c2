"""What only a device has: GB/s over the bus, by path and size, and both ways at once beside one
large copy; and what transfers at full rate take from a step's kernels, by the way they go to the
driver.

Large pieces cross by the copy engines, which take memory bandwidth only. Small pieces of loads go
by a kernel of ours (`csrc/path.h`), which takes processors too: both are measured, and small
pieces also without the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from bench.copy_engine.machine import Machine, Stream
from bench.copy_engine.report import Say, Section, Target, size, spread
from bench.copy_engine.rig import Rig, checked
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.abi import Direction

PATHS = {"batch": 1, "loop": 2, "gather": 3}  # the bits of ckv_stats.paths
AIM_OF_PEAK, AIM_BOTH = 95.0, 80.0
BOTH = (Direction.LOAD, Direction.STORE)
WARM_UP = 5  # units of work that are not counted
LOAD, STORE = (Direction.LOAD,), (Direction.STORE,)
OUTSTANDING = 3  # transfers: the lane never finds its queue empty
LOOK_S = 0.0005


def measure_sweep(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """One transfer of N blocks at a time, by path, chunk size and direction."""
    section = Section(
        "sweep",
        f"Engine, GB/s of one transfer from submit to done, median of {sizes.repeats}",
        ("chunk", "blocks", "direction", *PATHS),
        note="Shuffled blocks, one region; `-`: no such path here. By itself no store is gathered.",
    )
    for chunk in sizes.chunks:
        counts = [n for n in sizes.counts if n * chunk <= sizes.sweep_bytes]
        if not counts:
            continue
        found: dict[tuple[int, Direction], dict[str, str]] = {}
        for path, bit in PATHS.items():
            say(f"sweep, chunks of {size(chunk)}, {path}")
            with Rig(machine, max(counts), chunk, path=path) as rig:
                if not rig.engine.stats().paths >> bit & 1:
                    continue
                for count in counts:
                    for way in BOTH:
                        rates = _rates(rig, way, count, sizes.repeats)
                        section.samples[f"{chunk}, {count}, {way.name.lower()}, {path}"] = rates
                        cell = f"{statistics.median(rates):.2f}"
                        found.setdefault((count, way), {})[path] = cell
        for (count, way), cells in found.items():
            row = [cells.get(path, "-") for path in PATHS]
            section.rows.append((size(chunk), str(count), way.name.lower(), *row))
    return section


def _rates(rig: Rig, way: Direction, count: int, repeats: int) -> list[float]:
    rig.finish(way, 0, count)
    done = [rig.finish(way, 0, count) for _ in range(repeats)]
    return [each.bytes / (each.done_ns - each.submit_ns) for each in done]


def measure_duplex(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """The engine kept at work one way and both ways, beside the one-way peak of the same run."""
    chunk = sizes.chunks[-1]
    section = Section(
        "duplex",
        f"Engine kept at work, chunks of {size(chunk)}, GB/s, median of {sizes.repeats}",
        ("direction", "GB/s", "peak", "of the peak"),
        note=f"Peak: one copy of {size(sizes.peak_bytes)}, taken in turn with the engine's.",
    )
    num_blocks = max(6, sizes.peak_bytes // chunk)
    stream = Stream(machine)
    host, vram = machine.host(sizes.peak_bytes), machine.vram(sizes.peak_bytes)
    shares: dict[Direction, float] = {}
    with Rig(machine, num_blocks, chunk) as rig:
        for way in BOTH:
            say(f"kept at work: {way.name.lower()}")
            ends = (vram, host) if way is Direction.LOAD else (host, vram)
            _plain(stream, *ends)
            rates, peaks = [], []
            for _ in range(sizes.repeats):
                peaks.append(_plain(stream, *ends))
                rates.append(_fed_rate(rig, (way,), sizes.fed_s))
            name = way.name.lower()
            section.samples[name], section.samples[f"peak {name}"] = rates, peaks
            ratios = [rate / peak for rate, peak in zip(rates, peaks, strict=True)]
            shares[way] = 100 * statistics.median(ratios)
            cells = [f"{statistics.median(each):.1f}" for each in (rates, peaks)]
            section.rows.append((name, *cells, f"{shares[way]:.0f} %"))
        say("kept at work: both ways")
        both = [_fed_rate(rig, BOTH, sizes.fed_s) for _ in range(sizes.repeats)]
    section.samples["both"] = both
    section.rows.append(("both at once, sum", f"{statistics.median(both):.1f}", "-", "-"))
    for way, share in shares.items():
        text = f"{way.name.lower()} of {size(chunk)} chunks, of the one-way peak"
        section.targets.append(Target(text, share, AIM_OF_PEAK, "%", at_most=False))
    text = "both ways at once (aim of an H100)"
    section.targets.append(Target(text, statistics.median(both), AIM_BOTH, "GB/s", at_most=False))
    return section


def _plain(stream: Stream, dst: Tensor, src: Tensor) -> float:
    began = time.perf_counter()
    stream.copy(dst, src)
    stream.synchronize()
    return src.numel() / (time.perf_counter() - began) / 1e9


def _fed_rate(rig: Rig, ways: tuple[Direction, ...], seconds: float) -> float:
    with fed(rig, ways) as meter:
        time.sleep(seconds)
        return meter.rate()


# --- an engine that is kept at work ------------------------------------------------------------
class Meter:
    """Bytes that the engine copied, by its own count: not in whole transfers."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.restart()

    def restart(self) -> None:
        """What is counted begins now."""
        self._before, self._began = self._num_bytes(), time.perf_counter()

    def rate(self) -> float:
        """GB/s since the start, both directions."""
        return (self._num_bytes() - self._before) / (time.perf_counter() - self._began) / 1e9

    def _num_bytes(self) -> int:
        return sum(self._rig.engine.stats().num_bytes)


@contextlib.contextmanager
def fed(rig: Rig, directions: Sequence[Direction]) -> Iterator[Meter]:
    """Copies in these directions all the while, metered once they flow, and checked."""
    share = rig.num_blocks // max(1, len(directions))
    meter, stop = Meter(rig), threading.Event()
    with ThreadPoolExecutor(len(BOTH)) as threads:
        feeders = [
            threads.submit(_feed, rig, way, i * share, share // OUTSTANDING, stop)
            for i, way in enumerate(directions)
        ]
        try:
            while meter.rate() == 0 and not all(feeder.done() for feeder in feeders):
                time.sleep(LOOK_S)
            meter.restart()
            yield meter
        finally:
            stop.set()
        for feeder in feeders:
            feeder.result()  # or what went wrong there
    for completion in rig.engine.poll_timed():
        checked(completion)


def _feed(rig: Rig, way: Direction, first: int, count: int, stop: threading.Event) -> None:
    """Keep one direction copying, so many blocks at a time, from a thread that sleeps in the
    library most of the time. What is queued when it is told to stop finishes."""
    firsts = [first + i * count for i in range(OUTSTANDING)]
    queued = deque((rig.submit(way, each, count), each) for each in firsts)
    while queued:
        tag, each = queued.popleft()
        rig.wait(tag)
        if not stop.is_set():
            queued.append((rig.submit(way, each, count), each))


# --- kernels beside transfers ------------------------------------------------------------------
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
