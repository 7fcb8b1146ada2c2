"""The cells of the matrix: what matrix.toml says of each, made into a machine and a workload.

A cell says how hard it is, never how large the machine: the window in which programs arrive
follows from `load`, the pools from `live_vram` and `live_dram` and what the workload asks.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.sim.hardware import GB, Machine, machine
from bench.sim.load import Demand, demand, stretched
from bench.sim.plan import Workload
from bench.sim.workloads import registry

PATH = Path(__file__).with_name("matrix.toml")
LEAST_TURNS = 2  # so many of the longest turn fit into VRAM at least


@dataclass(frozen=True)
class Cell:
    """One cell. `load`: GPU seconds of all turns with a perfect memory, per second of the window
    in which programs arrive. `live_vram`, `live_dram`: KV of the programs under way at once, over
    the pool. `aim`: "best", or "stock" where nothing is to be won. `fast`: tests run it.
    `reason`: why ours is not within 2 % of the best arm there, "" if it is."""

    name: str
    workload: str
    parameters: dict[str, Any]
    load: float
    live_vram: float
    live_dram: float
    gpu: str
    model: str
    block_size: int
    pcie_gb_s: float | None = None
    aim: str = "best"
    fast: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Scene:
    """A cell and a seed, ready to be played. `demand`: of the workload as it is played."""

    cell: Cell
    seed: int
    machine: Machine
    workload: Workload
    demand: Demand
    window_s: float


@dataclass(frozen=True)
class Matrix:
    """`seeds`: by what they are for: "dev", "report"."""

    cells: tuple[Cell, ...]
    seeds: dict[str, tuple[int, ...]]


def load_matrix(path: Path = PATH) -> Matrix:
    """Read the matrix. A cell's fields are those of its `base` and its own; what is no field of
    Cell goes to the workload. Raises TypeError or KeyError that names what is missing."""
    with path.open("rb") as file:
        text = tomllib.load(file)
    bases = text["base"]
    cells = [_cell(name, {**bases[own["base"]], **own}) for name, own in text["cell"].items()]
    return Matrix(tuple(cells), {what: tuple(seeds) for what, seeds in text["seeds"].items()})


def _cell(name: str, said: dict[str, Any]) -> Cell:
    fields = {key: value for key, value in said.items() if key in Cell.__dataclass_fields__}
    parameters = {k: v for k, v in said.items() if k not in fields and k != "base"}
    return Cell(name=name, parameters=parameters, **fields)


def scene(cell: Cell, seed: int) -> Scene:
    """Lay out the cell's workload and size the machine for it."""
    workload = registry.build(cell.workload, {**cell.parameters, "seed": seed})
    on = {"pcie_gb_s": cell.pcie_gb_s, "block_size": cell.block_size}
    unlimited = machine(cell.gpu, cell.model, kv_tokens=1 << 40, **on)
    window_s = demand(workload, unlimited).work_s / cell.load
    workload = stretched(workload, window_s)
    asked = demand(workload, unlimited)
    least = LEAST_TURNS * workload.num_tokens
    kv_tokens = max(round(asked.live_tokens / cell.live_vram), least)
    dram_gb = asked.live_tokens / cell.live_dram * unlimited.model.token_bytes / GB
    sized = machine(cell.gpu, cell.model, kv_tokens=kv_tokens, dram_gb=dram_gb, **on)
    return Scene(cell, seed, sized, workload, asked, window_s)
