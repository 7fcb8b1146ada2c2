"""How fast the engine writes and reads a disk, and for how much CPU, beside fio."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cli import start, teaching_parser, whole
from bench.disk import fio
from bench.disk.rig import Sample, Shape, Threads
from continuum_connector.errors import TransferError
from continuum_connector.tools.cli.ending import ToldError

MIB = 1 << 20
SUMMED, UNSUMMED, RIVAL = "threads", "no sums", "fio"
NO_DISK = ("tmpfs", "ramfs")
WIDTH = 110

TEACH = """\
what happens
  For each shape (direction, slot size, depth) the arms take turns, each round in another order,
  because a drive has caches and moods: only ratios within a round mean something.
    threads   the engine as it serves: a header page, a sum over all bytes, threads of its own
    no sums   the same, bytes neither summed nor compared
    fio       io_uring (libaio where that is forbidden), direct, the same pieces, no sums
  Every file is written as a whole before the first round.

reading the table
  GB/s      median over the rounds
  of fio    median, least and most of threads / fio within a round; without fio: -
  CPU       milliseconds of CPU per GB, of all threads of the process

  The folder must be on the drive that is meant; a folder in memory is refused.

examples
  python -m bench.disk /mnt/nvme
  python -m bench.disk /mnt/nvme --quick
  python -m bench.disk /mnt/nvme --slot-kib 2048 --depth 1,4,8,16 --gib 16 --json disk.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write where asked to."""
    options = parse(argv)
    refuse_memory(options.folder)
    console = Console(stderr=True, highlight=False)
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=options.folder) as folder:
        for shape in shapes(options):
            console.print(f"{shape} ...")
            try:
                results.append(measure(Path(folder), shape, options.rounds))
            except (TransferError, RuntimeError) as error:
                raise ToldError(f"{shape}: {str(error).rstrip('.')}") from None
    Console(width=WIDTH).print(table(results))
    if options.json:
        options.json.write_text(json.dumps(document(options, results), indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = teaching_parser("python -m bench.disk", __doc__, TEACH)
    add = parser.add_argument
    add("folder", type=Path, help="a folder on the drive")
    add("--slot-kib", type=numbers, default=[256, 1024, 2048], metavar="N,..", help="slot sizes")
    add("--depth", type=numbers, default=[8], metavar="N,..", help="slots under way at once")
    add("--gib", type=whole(1, 1024), default=4, help="moved per run, and room per arm")
    add("--rounds", type=whole(1, 1000), default=5)
    add("--quick", action="store_true", help="2 MiB alone, 1 GiB, 3 rounds")
    add("--json", type=Path, metavar="FILE", help="every sample")
    options: argparse.Namespace = parser.parse_args(argv)
    if options.quick:
        options.slot_kib, options.gib, options.rounds = [2048], 1, 3
    return options


def numbers(text: str) -> list[int]:
    return [whole(1, 65536)(each) for each in text.split(",")]


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Every shape; slots are whole pages."""
    return [
        Shape(kib * 1024 // 4096 * 4096 or 4096, depth, options.gib << 30, writes)
        for writes in (False, True)
        for kib in options.slot_kib
        for depth in options.depth
    ]


def refuse_memory(folder: Path) -> None:
    """A folder that is none, or lies in memory, would be measured for nothing."""
    if not folder.is_dir():
        raise ToldError(f"{folder} is no folder; name one on the drive that is meant")
    where, kinds = folder.resolve(), {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        kinds[point] = kind
    point = next(str(each) for each in (where, *where.parents) if str(each) in kinds)
    if kinds[point] in NO_DISK:
        raise ToldError(f"{folder} lies in memory ({kinds[point]} on {point}); name one on a drive")


def measure(folder: Path, shape: Shape, num_rounds: int) -> dict[str, Any]:
    """The arms' samples of one shape, by round."""
    arms: dict[str, Threads | fio.Fio] = {}
    try:
        arms[SUMMED] = Threads(folder, shape, sums=True)
        arms[UNSUMMED] = Threads(folder, shape, sums=False)
        if fio.is_here():
            arms[RIVAL] = fio.Fio(folder, shape)
        names, rounds = list(arms), []
        for i in range(num_rounds):
            turn = names[i % len(names) :] + names[: i % len(names)]
            rounds.append({name: arms[name].sample() for name in turn})
        is_direct = all(arm.is_direct for arm in arms.values() if isinstance(arm, Threads))
        return {"shape": shape, "rounds": rounds, "is_direct": is_direct}
    finally:
        for arm in arms.values():
            arm.close()


def table(results: Sequence[dict[str, Any]]) -> Table:
    """One row per shape."""
    made = Table(box=None, header_style="bold")
    made.add_column("shape", no_wrap=True)
    for name in ("GB/s", "of fio", "of no sums", "CPU", "no sums", "fio"):
        made.add_column(name, justify="right", no_wrap=True)
    for result in results:
        rounds = result["rounds"]
        direct = "" if result["is_direct"] else ", buffered"
        made.add_row(
            f"{result['shape']}{direct}",
            f"{statistics.median(each[SUMMED].gb_per_s for each in rounds):.2f}",
            ratio(rounds, RIVAL),
            ratio(rounds, UNSUMMED),
            *(cpu(rounds, name) for name in (SUMMED, UNSUMMED, RIVAL)),
        )
    return made


def ratio(rounds: Sequence[dict[str, Sample]], rival: str) -> str:
    """Of threads to `rival` within a round: median, least and most."""
    if rival not in rounds[0]:
        return "-"
    each = [one[SUMMED].gb_per_s / one[rival].gb_per_s for one in rounds]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def cpu(rounds: Sequence[dict[str, Sample]], name: str) -> str:
    if name not in rounds[0]:
        return "-"
    return f"{statistics.median(each[name].cpu_ms_per_gb for each in rounds):.0f} ms/GB"


def document(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result as JSON: every sample, and where it was taken."""
    return {
        "bench": "disk",
        "date": date.today().isoformat(),
        "machine": platform.platform(),
        "num_cpus": os.cpu_count(),
        "rounds": options.rounds,
        "results": [
            {
                "shape": asdict(each["shape"]),
                "is_direct": each["is_direct"],
                "rounds": [{k: asdict(v) for k, v in one.items()} for one in each["rounds"]],
            }
            for each in results
        ],
    }


if __name__ == "__main__":
    start(main, "python -m bench.disk")
