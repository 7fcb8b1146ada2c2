"""The cells of the matrix: what matrix.toml says of each, made into a machine and a workload.

A cell says how hard it is, never how large the machine: the window in which programs arrive
follows from `load`, the pools from `live_vram` and `live_dram` and what the workload asks. One that
says a `rate` is played as it was measured: so many programs a second, VRAM as counted, `dram_gb`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from bench.common.plans import Workload
from bench.sim.hardware import GB, Machine, machine
from bench.sim.job import Plain
from bench.sim.load import demand, stretched
from bench.sim.workloads import registry

PATH = Path(__file__).with_name("matrix.toml")
ON_MACHINE = (
    *("gpu", "model", "block_size", "pcie_gb_s", "disk_gb_s"),
    *("max_num_batched_tokens", "max_num_seqs"),
)
LEAST_TURNS = 2  # so many of the longest turn fit into VRAM at least


@dataclass(frozen=True)
class Cell:
    """One cell. `said`: what its runs depend on: the workload's name and parameters, and

    `load`: GPU seconds of all turns with a perfect memory, per second of the window in which
    programs arrive, so nominal where they outlast it; `live_vram`, `live_dram`: KV of the
    programs under way at once, over the pool, and over the disk where there is one, `live_disk`;
    `gpu`, `model`, `block_size`, `pcie_gb_s`, `disk_gb_s`: as in hardware.machine.

    `aim`: "best", or "stock" where nothing is to be won. `fast`: tests run it. `reason`: why ours
    is not within the aim there, "" if it is.
    """

    name: str
    said: dict[str, Plain]
    aim: str = "best"
    fast: bool = False
    reason: str = ""

    @property
    def has_disk(self) -> bool:
        return "live_disk" in self.said

    @property
    def workload(self) -> str:
        return str(self.said["workload"])


@dataclass(frozen=True)
class Scene:
    """A cell with a seed, ready to be played; `window_s`: in which programs arrive."""

    machine: Machine
    workload: Workload
    window_s: float


@dataclass(frozen=True)
class Matrix:
    """`seeds`: by what they are for: "dev", "report"."""

    cells: tuple[Cell, ...]
    seeds: dict[str, tuple[int, ...]]


def load_matrix() -> Matrix:
    """Read the matrix. What a cell says is what its `base` says, and its own on top."""
    with PATH.open("rb") as file:
        text = tomllib.load(file)
    cells = [
        cell_of({**text["base"][own["base"]], **own, "cell": name})
        for name, own in text["cell"].items()
    ]
    return Matrix(tuple(cells), {what: tuple(seeds) for what, seeds in text["seeds"].items()})


def cell_of(fields: Mapping[str, Any]) -> Cell:
    """The cell that these say; `cell` is its name."""
    about = {key: fields[key] for key in ("aim", "fast", "reason") if key in fields}
    said = {k: v for k, v in fields.items() if k not in about and k not in ("base", "cell")}
    return Cell(fields["cell"], said, **about)


def scene(cell: Cell, seed: int) -> Scene:
    """Lay out the cell's workload and size the machine for it.

    Raises KeyError if the cell does not say how hard it is or on what it runs, ValueError if it
    says something that its workload does not know.
    """
    said: dict[str, Any] = dict(cell.said)
    if "rate" in said:
        return _as_measured(seed, said)
    load, live_vram, live_dram = (said.pop(key) for key in ("load", "live_vram", "live_dram"))
    live_disk = said.pop("live_disk", math.inf)
    hardware = {key: said.pop(key) for key in ON_MACHINE if key in said}
    workload = registry.build(said.pop("workload"), {**said, "seed": seed})
    unlimited = machine(kv_tokens=1 << 40, **hardware)
    window_s = demand(workload, unlimited).work_s / load
    workload = stretched(workload, window_s)
    asked = demand(workload, unlimited)
    kv_tokens = max(round(asked.live_tokens / live_vram), LEAST_TURNS * workload.num_tokens)
    live_gb = asked.live_tokens * unlimited.model.token_bytes / GB
    room = {"dram_gb": live_gb / live_dram, "disk_gb": live_gb / live_disk}
    sized = machine(kv_tokens=kv_tokens, **room, **hardware)
    return Scene(sized, workload, window_s)


def _as_measured(seed: int, said: dict[str, Any]) -> Scene:
    on = {key: said.pop(key) for key in (*ON_MACHINE, "dram_gb", "kv_tokens") if key in said}
    workload = registry.at_rate(said.pop("workload"), said, seed)
    return Scene(machine(**on), workload, len(workload.programs) / said["rate"])
