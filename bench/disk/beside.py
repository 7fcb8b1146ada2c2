"""How much longer a step takes while the disk is read: the CPU's part of it.

    python -m bench.disk.beside /mnt/nvme
    python -m bench.disk.beside /mnt/nvme --seconds 60 --step-ms 20

A step stands for what one core does of an engine's: Python, then a walk through more memory than
caches hold. It also asks the engine's disk threads for more and takes what they read, as a worker
does in each step, and never waits for them. Spans with reads and without take turns; only ratios of
neighbours mean something. Where others want the cores as well, the clock says little: a thread that
waits for its turn counts as slow. Its CPU time says what reads cost it in caches and memory, and
for asking. What a GPU does of a step is not in it, nor DMA on the same PCIe switch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cli import start, teaching_parser, whole
from bench.disk.__main__ import refuse_memory
from bench.disk.rig import GB, Shape, Threads

SPAN_S = 1.0
MIB = 1 << 20
_WALK = 32 * MIB  # more than most caches
_SPIN = 1000  # turns of a loop between two looks at the clock


@dataclass(frozen=True)
class Span:
    """Steps in a row: seconds of each, CPU seconds that their thread took for them on average, and
    how fast the disk was read meanwhile."""

    steps: Sequence[float]
    cpu_s: float
    gb_per_s: float


class Step:
    """Always the same work, of about so many seconds on an idle core."""

    def __init__(self, seconds: float) -> None:
        self._memory = np.ones(_WALK, np.uint8).data
        self.num_spins, self.num_bytes = 1, MIB
        began = time.thread_time()  # which no other thread on the core stretches
        for _ in range(20):
            self._spin(_SPIN)
        a_spin = (time.thread_time() - began) / 20
        began = time.thread_time()
        zlib.crc32(self._memory)
        a_byte = (time.thread_time() - began) / _WALK
        self.num_spins = max(1, round(seconds / 2 / a_spin))
        self.num_bytes = round(seconds / 2 / a_byte)

    def __call__(self) -> None:
        self._spin(_SPIN * self.num_spins)
        for first in range(0, self.num_bytes, _WALK):
            zlib.crc32(self._memory[: min(_WALK, self.num_bytes - first)])

    def _spin(self, number: int) -> None:
        total = 0
        for each in range(number):
            total += each


def span(step: Step, threads: Threads, with_reads: bool, seconds: float = SPAN_S) -> Span:
    """Steps for so long; whatever is under way at its end is waited for, outside of any step."""
    steps: list[float] = []
    num_bytes, began, used = 0, time.perf_counter(), time.thread_time()
    while not steps or time.perf_counter() - began < seconds:
        first = time.perf_counter()
        if with_reads:
            num_bytes += threads.follow()
        step()
        steps.append(time.perf_counter() - first)
    seconds_now, used_now = time.perf_counter() - began, time.thread_time() - used
    threads.rest()
    return Span(steps, used_now / len(steps), num_bytes / GB / seconds_now)


def told(pairs: Sequence[tuple[Span, Span]]) -> str:
    """The result as lines: of spans with reads, each beside one without."""
    walls = [statistics.fmean(w.steps) / statistics.fmean(a.steps) for w, a in pairs]
    alone = [s for _, a in pairs for s in a.steps]
    with_reads = [s for w, _ in pairs for s in w.steps]
    tails = f"{np.quantile(alone, 0.99) * 1e3:.1f} -> {np.quantile(with_reads, 0.99) * 1e3:.1f} ms"
    return (
        f"a step with reads / alone, by the clock: {shown(walls)}\n"
        f"the CPU time of its thread:              {shown([w.cpu_s / a.cpu_s for w, a in pairs])}\n"
        f"a step alone: {statistics.fmean(alone) * 1e3:.1f} ms, of that CPU "
        f"{statistics.fmean(a.cpu_s for _, a in pairs) * 1e3:.1f} ms; P99: {tails}\n"
        f"read meanwhile: {statistics.fmean(w.gb_per_s for w, _ in pairs):.2f} GB/s"
    )


def shown(ratios: Sequence[float]) -> str:
    """Their median, and where half of them lie."""
    low, high = np.quantile(ratios, [0.25, 0.75])
    median = statistics.median(ratios)
    return f"median {median:.3f}, half of {len(ratios)} pairs {low:.3f} to {high:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(argv)
    refuse_memory(options.folder)
    shape = Shape(options.slot_kib * 1024 // 4096 * 4096, options.depth, options.mib * MIB, False)
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=options.folder) as folder:
        threads = Threads(Path(folder), shape, sums=True)
        try:
            step, pairs = Step(options.step_ms / 1e3), []
            for number in range(options.seconds // 2):
                both = [span(step, threads, with_reads) for with_reads in order(number)]
                pairs.append((both[number % 2], both[1 - number % 2]))
        finally:
            threads.close()
    print(f"{shape}, {'direct' if threads.is_direct else 'through the page cache'}")
    print(told(pairs))
    return 0


def order(number: int) -> tuple[bool, bool]:
    """With reads first, or without, in turns."""
    return (True, False) if number % 2 == 0 else (False, True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__
    parser = teaching_parser("python -m bench.disk.beside", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a folder on the drive")
    add("--seconds", type=whole(2, 10_000), default=60, help="half of them with reads; default 60")
    add("--step-ms", type=whole(1, 1000), default=20, help="of a step, about; default 20")
    add("--slot-kib", type=whole(4, 65_536), default=2048, help="default 2048")
    add("--depth", type=whole(1, 64), default=8, help="slots of an order; default 8")
    add("--mib", type=whole(16, 1 << 20), default=1024, help="of the file; default 1024")
    options: argparse.Namespace = parser.parse_args(argv)
    return options


if __name__ == "__main__":
    start(main, "python -m bench.disk.beside")
