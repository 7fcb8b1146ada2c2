"""Does the lab tell what was measured? Every published cell, and our own runs on a GPU, beside what
the lab makes of it.

Only the FCFS column was fitted to (`mfu` and `step_s` in hardware.py); Continuum's and LMCache's
are held out, and so are our own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import markers
from bench.cli import many, start, teaching_parser
from bench.common.tables import markdown
from bench.results import kept
from bench.sim.job import Job, Plain, Result
from bench.sim.published import CONTINUUM, DRAM_GB, FCFS, LMCACHE, OUR_MACHINE, OUR_WINDOW_S, Table
from bench.sim.runner import play_without_turns, run

README = Path(__file__).with_name("README.md")
TEACH = """
Each cell is  measured / simulated / ratio  (simulated by measured), seconds of mean JCT; `-` was
not published. The last line of a column is its rms log error: 0.10 is off by 10 % either way.

  python -m bench.sim.validate                  all cells; what is in the file is not run again
  python -m bench.sim.validate --gpu H100       one GPU
  python -m bench.sim.validate --write          and put both tables into README.md
"""


@dataclass(frozen=True)
class Column:
    """An arm of the lab held against a published table."""

    title: str
    arm: str
    table: Table


COLUMNS = (
    Column("FCFS: `stock` (fitted)", "stock", FCFS),
    Column("Continuum: `paper`", "paper", CONTINUUM),
    Column("Continuum: `cont-pin`", "cont-pin", CONTINUUM),
    Column("Continuum: `stock+order`, no pins", "stock+order", CONTINUUM),
    Column("LMCache: `lmcache`", "lmcache", LMCACHE),
)
OUR_ARMS = {"none": "stock", "continuum": "adaptive", "simple": "simple"}  # in the lab


def job(arm: str, gpu: str, rate: int) -> Job:
    """One published cell: vLLM 0.10 admitted a turn before all of its prompt had room."""
    told: dict[str, Plain] = {"gpu": gpu, "dram_gb": DRAM_GB[gpu], "reserve_full_isl": False}
    return Job(arm, "eight_turns", {"rate": rate}, told)


def our_runs() -> dict[tuple[int, int], dict[str, float]]:
    """Of bench/results/gpu.json: (JPS, seed) -> arm -> seconds."""
    runs: dict[tuple[int, int], dict[str, float]] = {}
    for rate, seed, arm, jct_s, *_ in kept.read("gpu").rows:
        runs.setdefault((int(str(rate)), int(str(seed))), {})[str(arm).strip("`")] = float(
            str(jct_s)
        )
    return runs


def our_job(arm: str, rate: int, seed: int) -> Job:
    """One of our own runs, on an H200 with a small VRAM pool."""
    params: dict[str, Plain] = {"rate": rate, "window_s": OUR_WINDOW_S[rate]}
    return Job(OUR_ARMS[arm], "eight_turns", params, OUR_MACHINE, seed)


def log_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Root of the mean square of log(simulated / measured)."""
    squares = [math.log(simulated / measured) ** 2 for measured, simulated in pairs]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def mean_jct_s(results: Iterable[Result]) -> dict[str, float]:
    """Key of each job that was run -> seconds."""
    return {
        result.job.key: sum(result.record.jct_s.values()) / len(result.record.jct_s)
        for result in results
        if result.record is not None
    }


def validation(jct_s: dict[str, float], gpus: Sequence[str]) -> str:
    """The table, in Markdown."""
    rows = []
    pairs: dict[str, list[tuple[float, float]]] = {column.title: [] for column in COLUMNS}
    for gpu in gpus:
        for rate in sorted({rate for column in COLUMNS for rate in column.table.get(gpu, {})}):
            rows.append([f"{gpu} {rate}"])
            for column in COLUMNS:
                measured = column.table.get(gpu, {}).get(rate)
                simulated = jct_s.get(job(column.arm, gpu, rate).key)
                rows[-1].append(_told(measured, simulated, pairs[column.title]))
    errors = [f"{log_error(each):.2f}" for each in pairs.values()]
    return markdown(["GPU, JPS", *pairs], [*rows, ["rms log error", *errors]])


def our_validation(jct_s: dict[str, float]) -> str:
    """The table of our own runs, in Markdown."""
    rows, pairs = [], list[tuple[float, float]]()
    for (rate, seed), measured in our_runs().items():
        simulated = {arm: jct_s.get(our_job(arm, rate, seed).key) for arm in OUR_ARMS}
        told = (_told(measured.get(arm), simulated[arm], pairs) for arm in OUR_ARMS)
        rows.append([f"{rate} for {OUR_WINDOW_S[rate]} s, seed {seed}", *told])
    titles = ["JPS", *(f"`{arm}`: `{lab}`" for arm, lab in OUR_ARMS.items())]
    return f"{markdown(titles, rows)}\n\nrms log error: {log_error(pairs):.2f}"


def _told(measured: float | None, simulated: float | None, pairs: list[tuple[float, float]]) -> str:
    """A cell, which is counted among `pairs` where both are known."""
    if measured is None or simulated is None:
        return "-"
    pairs.append((measured, simulated))
    return f"{_short(measured)} / {_short(simulated)} / {simulated / measured:.2f}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table. Returns 0, or what the runner returns."""
    parser = teaching_parser("python -m bench.sim.validate", __doc__, TEACH)
    parser.add_argument("--gpu", action="append", choices=list(DRAM_GB), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/validation.jsonl"))
    parser.add_argument("--workers", type=many, default=0, help="processes; default: one per core")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    args = parser.parse_args(argv)
    gpus = args.gpu or list(DRAM_GB)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    outcome = run(_jobs(gpus), args.out, num_workers=args.workers, play=play_without_turns)
    jct_s = mean_jct_s(outcome.results)
    tables = {"validation": validation(jct_s, gpus)}
    if "H200" in gpus:
        tables["our own"] = our_validation(jct_s)
    print("\n\n".join(tables.values()))
    print(outcome, file=sys.stderr)
    if args.write:
        markers.rewrite(README, tables)
    return outcome.exit_code


def _jobs(gpus: Sequence[str]) -> list[Job]:
    published = [
        job(column.arm, gpu, rate)
        for column in COLUMNS
        for gpu, rates in column.table.items()
        for rate in rates
        if gpu in gpus
    ]
    ours = [our_job(arm, *point) for point in our_runs() for arm in OUR_ARMS]
    return [*published, *ours] if "H200" in gpus else published


if __name__ == "__main__":
    start(main, "python -m bench.sim.validate")
