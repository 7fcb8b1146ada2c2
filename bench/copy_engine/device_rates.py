"""GB/s over the bus: the engine by path and size, and both ways at once beside one large copy.

And how fast a host pool is populated and page-locked, with and without huge pages."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from bench.copy_engine.machine import Machine, Stream
from bench.copy_engine.report import Say, Section, Target, size
from bench.copy_engine.rig import Rig, checked
from bench.copy_engine.sizes import Sizes
from continuum_connector.worker.abi import Direction

PATHS = {"batch": 1, "loop": 2, "gather": 3}  # the bits of ckv_stats.paths
AIM_OF_PEAK, AIM_BOTH = 95.0, 80.0
BOTH = (Direction.LOAD, Direction.STORE)
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
            if not _has_path(machine, bit):
                continue
            with Rig(machine, max(counts), chunk, path=path) as rig:
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


def _has_path(machine: Machine, bit: int) -> bool:
    with Rig(machine, 1, 4096) as rig:
        return bool(rig.engine.stats().paths >> bit & 1)


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


def measure_pin(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """GB/s of both parts, as the pool's own state says, and of the whole call."""
    section = Section(
        "pin",
        f"Host pool of {size(sizes.pool_bytes)}, GB/s",
        ("chunk", "huge pages", "populate", "page-lock", "whole call"),
        note="`-`: that part took no time (the simulator locks nothing). Populating memory that "
        "this machine never touched before costs more than what is measured here later on.",
    )
    for chunk in sizes.pool_chunks:
        for huge in (False, True):
            say(f"pool, chunks of {size(chunk)}, huge pages {'on' if huge else 'off'}")
            with Rig(machine, 1, 4096) as rig:
                began = time.perf_counter()
                state = rig.engine.map_pool(sizes.pool_bytes, chunk, huge)
                whole_s = time.perf_counter() - began
            cells = [_pool_rate(sizes, s) for s in (state.populate_s, state.lock_s, whole_s)]
            section.rows.append((size(chunk), "on" if huge else "off", *cells))
            section.samples[f"{chunk}, {'huge' if huge else 'small'}, whole call s"] = [whole_s]
    return section


def _pool_rate(sizes: Sizes, seconds: float) -> str:
    return f"{sizes.pool_bytes / seconds / 1e9:.2f}" if seconds > 0 else "-"


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
