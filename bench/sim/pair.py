"""Two arms of the matrix beside each other, cell by cell.

    python -m bench.sim.pair runs/matrix.jsonl gate adaptive

Ratios of the first arm to the second, below 1 is better: mean JCT, of the seeds' means and of each
seed; prompt tokens computed. First tokens of first turns in seconds, second arm -> first arm, P95.
Cells that differ by less than --least are counted only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from bench.cli import start, teaching_parser
from bench.sim import store
from bench.sim.job import RunRecord
from continuum_connector.errors import ToldError

FIRST_TTFT = "first_ttft_p95_s"  # in a record's `extra`

Pairs = Sequence[tuple[RunRecord, RunRecord]]  # a cell's, by seed


def main(arguments: Sequence[str]) -> int:
    parser = teaching_parser("python -m bench.sim.pair", __doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("arm")
    parser.add_argument("over")
    parser.add_argument("--least", type=float, default=0.01, help="default: 0.01")
    said = parser.parse_args(arguments)
    cells = pairs(said.results, said.arm, said.over)
    if not cells:
        raise ToldError(
            f"{said.results} has no cell with runs of both {said.arm} and {said.over}, so there is "
            "nothing to compare; run python -m bench.sim.matrix with both"
        )
    print("\n".join(table(cells, said.over, said.arm, said.least)))
    return 0


def pairs(path: Path, arm: str, over: str) -> dict[str, Pairs]:
    """By cell, the runs of both arms, for each seed that both have."""
    found = {}
    for cell, runs in store.by_cell(store.results(path).values()).items():
        ones, others = runs.get(arm, {}), runs.get(over, {})
        if seeds := sorted(ones.keys() & others.keys()):
            found[cell] = [(ones[seed], others[seed]) for seed in seeds]
    return found


def table(cells: Mapping[str, Pairs], over: str, arm: str, least: float) -> Iterator[str]:
    """Yield the lines of a Markdown table, and one on the cells that are not in it."""
    yield f"| cell | {over}, s | JCT | each seed | first TTFT P95, s | computed |"
    yield "|---|---|---|---|---|---|"
    alike = []
    for cell, both in cells.items():
        ratio = fmean(map(_mean, (a for a, _ in both))) / fmean(map(_mean, (b for _, b in both)))
        if abs(ratio - 1.0) < least:
            alike.append(ratio)
            continue
        computed = fmean(a.num_computed_tokens / b.num_computed_tokens for a, b in both)
        each = "/".join(f"{_mean(a) / _mean(b):.2f}" for a, b in both)
        first, before = (
            fmean(r.extra.get(FIRST_TTFT, 0.0) for r in arm) for arm in zip(*both, strict=True)
        )
        cost = f"{before:.1f} -> {first:.1f}" if before else "-"
        yield (
            f"| {cell} | {fmean(_mean(b) for _, b in both):.1f} | {ratio:.2f} | {each} | "
            f"{cost} | {computed:.2f} |"
        )
    if alike:
        yield (
            f"\n{len(alike)} other cells: {min(alike):.3f} to {max(alike):.3f}. "
            f"Ratios of {arm} to {over}."
        )


def _mean(record: RunRecord) -> float:
    return fmean(record.jct_s.values())


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.pair")
