"""The scenario matrix: every arm in every cell, and whether the aims hold.

    python -m bench.sim.matrix --seeds dev --out runs/matrix.jsonl
    python -m bench.sim.matrix --cells 'fast/*' --arms adaptive,lru_offload,stock
    python -m bench.sim.matrix --seeds report --out runs/report.jsonl --write

A run that is in `--out` is not repeated, unless the code has changed since.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

import msgspec

from bench.cli import any_number, many, names_of, start, teaching_parser
from bench.common.tables import quantile
from bench.sim import runner
from bench.sim.arms import ARMS
from bench.sim.cells import PATH, Cell, cell_of, load_matrix, scene
from bench.sim.job import Job, Result, RunRecord
from bench.sim.pair import FIRST_TTFT
from bench.sim.provenance import code_mark, versions
from bench.sim.store import by_cell
from bench.sim.verdict import Verdict, origin, page, verdict
from continuum_connector.errors import ToldError, shown

PAGE = PATH.with_name("MATRIX.md")


@dataclass(frozen=True)
class Ran:
    """What a call ran. `results`: of this code alone."""

    command: str
    cells: list[Cell]
    asked: list[Job]
    results: list[Result]
    done: runner.Outcome


def options(name: str, doc: str | None, arms: str = ",".join(ARMS)) -> argparse.ArgumentParser:
    """What every bench over cells is asked with."""
    parser = teaching_parser(f"python -m bench.sim.{name}", doc)
    add = parser.add_argument
    add("--cells", default="*", help="names, with * and ?, by commas")
    add("--arms", type=names_of(ARMS, "an arm"), default=arms, help=f"by commas: {arms}")
    add("--seeds", type=_seeds, default="dev", help="dev, report, or numbers by commas")
    add("--out", type=Path, default=Path(f"runs/{name}.jsonl"))
    add("--workers", type=many, default=0, help="processes; one per core if 0")
    return parser


def _seeds(text: str) -> Sequence[int]:
    """For an option's `type`: what the matrix calls them, or numbers by commas."""
    return load_matrix().seeds.get(text) or [any_number(each) for each in text.split(",")]


def ran(parser: argparse.ArgumentParser, said: argparse.Namespace) -> Ran:
    """Run what is missing of all arms in all cells that are meant."""
    patterns = said.cells.split(",")
    cells = [
        cell
        for cell in load_matrix().cells
        if any(fnmatch.fnmatchcase(cell.name, each) for each in patterns)
    ]
    if not cells:
        raise ToldError(f"no cell is called --cells {said.cells}; see {PATH.name}")
    asked = [
        job(c, arm, seed) for c in cells for arm in arms_of(c, said.arms) for seed in said.seeds
    ]
    command = shown(shlex.join([*parser.prog.split(), *sys.argv[1:]]))
    done = runner.run(asked, said.out, num_workers=said.workers, play=play, command=command)
    # What other code did, and this call did not come to, is left out.
    results = [each for each in done.results if each.code == code_mark()]
    return Ran(command, cells, asked, results, done)


def main(arguments: Sequence[str]) -> int:
    """Run what is missing, then print or write the page; returns the exit code."""
    parser = options("matrix", __doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    said = parser.parse_args(arguments)
    these = ran(parser, said)
    found = judge(these.cells, these.results, these.asked)
    source = origin(these.command, said.seeds, said.arms, code_mark(), versions())
    text = page(found, source, len(these.cells) - len(found))
    if said.write:
        PAGE.write_text(text)
    else:
        print(text)
    print(these.done, file=sys.stderr)
    return these.done.exit_code


def arms_of(cell: Cell, arms: Sequence[str]) -> list[str]:
    """Those that are something of their own on the cell's machine."""
    return [arm for arm in arms if not ARMS[arm].lacks(cell.has_disk)]


def job(cell: Cell, arm: str, seed: int) -> Job:
    """One run; the cell is in it whole, so that a changed one is run again."""
    return Job(arm, cell.workload, {"cell": cell.name, **cell.said}, seed=seed)


def play(one: Job) -> RunRecord:
    """Play a job of the matrix."""
    from bench.sim.lab import Lab

    made = scene(cell_of(one.params), one.seed)
    record = Lab(made.machine, ARMS[one.arm], made.workload).play()
    first = [turn.first_token - turn.arrived for turn in record.turns if not turn.index]
    return msgspec.structs.replace(
        runner.compact(record),
        turns=[],
        seed=one.seed,
        note=made.workload.note,
        extra={FIRST_TTFT: quantile(first, 0.95)},
    )


def judge(cells: Iterable[Cell], results: Iterable[Result], asked: Iterable[Job]) -> list[Verdict]:
    """One verdict per cell of which all runs `asked` for are done."""
    num_asked = Counter(each.params["cell"] for each in asked)
    runs = by_cell(results)
    num_done = {name: sum(map(len, arms.values())) for name, arms in runs.items()}
    whole = [cell for cell in cells if num_done.get(cell.name) == num_asked[cell.name]]
    return [verdict(cell, runs[cell.name]) for cell in whole]


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.matrix")
