"""Two arms of the matrix beside each other, cell by cell.

    python -m bench.sim.pair runs/matrix.jsonl gate adaptive

Ratios of the first arm to the second, below 1 is better: mean JCT, of the seeds' means and of each
seed; the seeds' mean P95 and longest; prompt tokens computed. First tokens of first turns in
seconds, second arm -> first arm, P95. Cells that differ by less than --least are counted only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from bench.cli import start, teaching_parser
from bench.common.tables import quantile
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
    yield f"| cell | {over}, s | JCT | each seed | P95 | longest | first TTFT P95, s | computed |"
    yield "|---|---|---|---|---|---|---|---|"
    alike = []
    for cell, both in cells.items():
        ratio = fmean(map(_mean, (a for a, _ in both))) / fmean(map(_mean, (b for _, b in both)))
        if abs(ratio - 1.0) < least:
            alike.append(ratio)
            continue
        each = "/".join(f"{_mean(a) / _mean(b):.2f}" for a, b in both)
        first, before = (
            fmean(r.extra.get(FIRST_TTFT, 0.0) for r in arm) for arm in zip(*both, strict=True)
        )
        cost = f"{before:.1f} -> {first:.1f}" if before else "-"
        yield (
            f"| {cell} | {fmean(_mean(b) for _, b in both):.1f} | {ratio:.2f} | {each} | "
            f"{_ratio(both, _p95):.2f} | {_ratio(both, lambda r: max(r.jct_s.values())):.2f} | "
            f"{cost} | {_ratio(both, lambda r: r.num_computed_tokens):.2f} |"
        )
    if alike:
        yield (
            f"\n{len(alike)} other cells: {min(alike):.3f} to {max(alike):.3f}. "
            f"Ratios of {arm} to {over}."
        )


def _mean(record: RunRecord) -> float:
    return fmean(record.jct_s.values())


def _p95(record: RunRecord) -> float:
    return quantile([*record.jct_s.values()], 0.95)


def _ratio(both: Pairs, of: Callable[[RunRecord], float]) -> float:
    return fmean(of(a) / of(b) for a, b in both)


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.pair")
