"""Named sweeps: jobs that belong together, each with its one-line text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.sim.job import Job
from bench.sim.published import DRAM_GB

PUBLISHED_RATES = (1, 3, 6, 10, 15)
PUBLISHED_ARMS = ("stock", "stock+order", "lmcache", "simple+order", "paper", "adaptive")


@dataclass(frozen=True)
class Sweep:
    name: str
    what: str
    jobs: Callable[[], Iterator[Job]]


def _published() -> Iterator[Job]:
    for gpu, dram_gb in DRAM_GB.items():
        for rate in PUBLISHED_RATES:
            for arm in PUBLISHED_ARMS:
                machine = {"gpu": gpu, "model": "llama-8b", "dram_gb": dram_gb}
                yield Job(arm, "eight_turns", {"rate": rate}, machine)


_SWEEPS = (
    Sweep(
        "published",
        "the published sweep's 20 points, 6 arms: 4 GPUs at 1, 3, 6, 10, 15 programs/s, 120 runs",
        _published,
    ),
)
SWEEPS = {sweep.name: sweep for sweep in _SWEEPS}
