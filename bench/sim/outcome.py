"""Outcome: one arm in one cell with one seed, as a line of the matrix's results."""

from __future__ import annotations

import hashlib
from pathlib import Path
from statistics import fmean

import msgspec

from bench.sim.cells import Cell
from bench.sim.result import RunRecord

SAYS_NOTHING = ("name", "aim", "fast", "reason")  # fields of a cell that change no run


class Outcome(msgspec.Struct, frozen=True):
    """`mark`: fingerprint of what the cell says, so that a changed cell is run again; `served_s`:
    mean over programs of their turns' seconds, the gaps left out."""

    cell: str
    mark: str
    arm: str
    seed: int
    jct_s: list[float]
    served_s: float
    num_computed_tokens: int
    num_local_tokens: int
    num_external_tokens: int
    stored_bytes: float
    loaded_bytes: float
    busy: float
    wall_s: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.cell, self.mark, self.arm, self.seed

    @property
    def mean_s(self) -> float:
        return fmean(self.jct_s)

    @property
    def p99_s(self) -> float:
        """Nearest rank: of fewer than a hundred programs the longest."""
        return sorted(self.jct_s)[-(-99 * len(self.jct_s) // 100) - 1]


def mark(cell: Cell) -> str:
    """Return the fingerprint of what a cell's runs depend on."""
    said = {key: value for key, value in vars(cell).items() if key not in SAYS_NOTHING}
    return hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()[:8]


def outcome(cell: Cell, seed: int, run: RunRecord) -> Outcome:
    """Keep of a run what the matrix asks."""
    return Outcome(
        cell=cell.name,
        mark=mark(cell),
        arm=run.arm,
        seed=seed,
        jct_s=[round(each, 3) for each in run.jct_s.values()],
        served_s=sum(turn.finished - turn.arrived for turn in run.turns) / len(run.jct_s),
        num_computed_tokens=run.num_computed_tokens,
        num_local_tokens=run.num_local_tokens,
        num_external_tokens=run.num_external_tokens,
        stored_bytes=run.stored_bytes,
        loaded_bytes=run.loaded_bytes,
        busy=run.busy_s / run.span_s,
        wall_s=run.wall_s,
    )


def read(path: Path) -> list[Outcome]:
    """The outcomes in a JSON-lines file; none if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as lines:
        return [msgspec.json.decode(line, type=Outcome) for line in lines if line.strip()]
