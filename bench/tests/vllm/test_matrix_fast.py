"""The matrix's fast cells: what holds today, with margins. MATRIX.md has all cells and arms."""

from __future__ import annotations

import pytest

pytest.importorskip("tomllib")  # Python 3.11

from bench.common.arms import OURS, STOCK
from bench.sim.cells import load_matrix
from bench.sim.job import Result
from bench.sim.matrix import job, judge, play

CELLS = {cell.name: cell for cell in load_matrix().cells if cell.fast}
SEED = 1
RIVALS = (STOCK, "stock+order", "simple+order", "lru_offload")
# Ours over stock, and over the best of RIVALS, at most.
BOUNDS = {
    "fast/none": (1.01, 1.01),
    "fast/near": (0.30, 1.03),
    "fast/dram 2": (0.42, 0.62),
    "coding/near": (0.58, 1.04),
    "single/near": (1.01, 1.01),
    "hybrid/fast": (0.25, 1.02),
}


@pytest.mark.parametrize("name", CELLS)
def test_what_holds_today(name: str) -> None:
    cell = CELLS[name]
    jobs = [job(cell, arm, SEED) for arm in (OURS, *RIVALS)]
    results = [Result(each, play(each)) for each in jobs]
    (found,) = judge([cell], results, jobs)
    to_stock, to_rivals = BOUNDS[name]
    best_s = min(found.mean_s[rival] for rival in RIVALS)
    assert found.to_stock <= to_stock, found.mean_s
    assert found.mean_s[OURS] / best_s <= to_rivals, found.mean_s
