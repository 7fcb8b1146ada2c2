"""GB/s by `checksum_every`: what summing stored blocks, and checking loaded ones, costs."""

from __future__ import annotations

import contextlib
import statistics

from bench.copy_engine.machine import Machine
from bench.copy_engine.report import Say, Section, size
from bench.copy_engine.rig import Rig
from bench.copy_engine.sizes import KIB, Sizes
from continuum_connector.worker.engine import Direction

EVERY = (0, 1, 64)
CHUNK = 512 * KIB  # bytes of a block
ROUNDS = 5


def measure_checksums(machine: Machine, sizes: Sizes, say: Say) -> Section:
    """The same store and load with each setting in turn; many times, for copies vary more than
    a sum takes."""
    chunk = min(CHUNK, sizes.copied_bytes // 4)
    num_blocks = sizes.copied_bytes // chunk
    section = Section(
        "checksums",
        f"Checksums: GB/s until reported, {size(sizes.copied_bytes)} in blocks of {size(chunk)}, "
        f"median of {ROUNDS * sizes.repeats}",
        ("direction", *(f"checksum_every {n}" for n in EVERY), "1 / 0", "64 / 0", "the sum alone"),
        note="Ratios are taken run by run. The sum alone: bytes by the time that checksum_every 1 "
        "takes longer than 0, in GB/s.",
    )
    say("checksums")
    with contextlib.ExitStack() as stack:
        rigs = {
            n: stack.enter_context(Rig(machine, num_blocks, chunk, checksum_every=n)) for n in EVERY
        }
        seconds: dict[tuple[Direction, int], list[float]] = {}
        for _ in range(ROUNDS * sizes.repeats):
            for direction in (Direction.STORE, Direction.LOAD):
                for n, rig in rigs.items():
                    done = rig.finish(direction, 0, num_blocks)
                    took = (done.done_ns - done.submit_ns) / 1e9
                    seconds.setdefault((direction, n), []).append(took)
    for direction in (Direction.STORE, Direction.LOAD):
        _add(section, direction, {n: seconds[direction, n] for n in EVERY}, num_blocks * chunk)
    return section


def _add(
    section: Section, direction: Direction, seconds: dict[int, list[float]], num_bytes: int
) -> None:
    where = direction.name.lower()
    for n, samples in seconds.items():
        section.samples[f"{where}, every {n}"] = [num_bytes / each / 1e9 for each in samples]
    rates = [statistics.median(section.samples[f"{where}, every {n}"]) for n in EVERY]
    ratios = [
        statistics.median(
            plain / summed for plain, summed in zip(seconds[0], seconds[n], strict=True)
        )
        for n in EVERY[1:]
    ]
    more = statistics.median(b - a for a, b in zip(seconds[0], seconds[1], strict=True))
    alone = f"{num_bytes / more / 1e9:.1f}" if more > 0 else "-"
    cells = [f"{each:.2f}" for each in (*rates, *ratios)]
    section.rows.append((where, *cells, alone))
