"""The scenario matrix: every arm in every cell, and whether the aims hold.

    python -m bench.sim.matrix --seeds dev --out runs/matrix.jsonl
    python -m bench.sim.matrix --cells 'fast/*' --arms adaptive,lru_offload,stock
    python -m bench.sim.matrix --seeds report --out runs/report.jsonl --write

A run that is in `--out` is not repeated: give a new file after a change of the code.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

from bench.sim.cells import PATH, Cell, load_matrix
from bench.sim.matrix_page import page
from bench.sim.outcome import Outcome, mark, read
from bench.sim.verdict import verdicts

Job = tuple[Cell, str, int]
PAGE = PATH.with_name("MATRIX.md")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cells", default="*", help="names, with * and ?, by commas")
    parser.add_argument("--arms", default="", help="names by commas; all arms if left out")
    parser.add_argument("--seeds", default="dev", help="dev, report, or numbers by commas")
    parser.add_argument("--fast", action="store_true", help="only the cells that a test runs")
    parser.add_argument("--out", type=Path, default=Path("runs/matrix.jsonl"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print or write the page."""
    said = parse(arguments)
    matrix = load_matrix()
    names = said.seeds
    seeds = matrix.seeds.get(names) or tuple(int(each) for each in names.split(","))
    cells = [c for c in matrix.cells if _is_meant(c, said.cells) and (c.fast or not said.fast)]
    jobs = list(_jobs(cells, said.arms, seeds))
    done = {each.key: each for each in read(said.out)}
    missing = [job for job in jobs if key(job) not in done]
    done |= {each.key: each for each in run(missing, said.out, said.workers)}
    command = " ".join(["python -m bench.sim.matrix", *(arguments or sys.argv[1:])])
    text = page(verdicts(cells, [done[key(job)] for job in jobs]), command, seeds)
    if said.write:
        PAGE.write_text(text)
    else:
        print(text)


def _is_meant(cell: Cell, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(cell.name, each) for each in patterns.split(","))


def _jobs(cells: Sequence[Cell], arms: str, seeds: Sequence[int]) -> Iterator[Job]:
    from bench.sim.arms import ARMS

    names = arms.split(",") if arms else list(ARMS)
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise SystemExit(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    return itertools.product(cells, names, seeds)


def key(job: Job) -> tuple[str, str, str, int]:
    """What a job's outcome is found by."""
    cell, arm, seed = job
    return cell.name, mark(cell), arm, seed


def run(jobs: Sequence[Job], out: Path, workers: int) -> Iterator[Outcome]:
    raise NotImplementedError


if __name__ == "__main__":
    main()
