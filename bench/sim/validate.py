"""Does the lab tell what was measured? Every published cell, and our own runs on a GPU, beside what
the lab makes of it.

Only the FCFS column was fitted to (`mfu` and `step_s` in hardware.py); Continuum's are held out,
and so are our own, and what single turns take.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench import markers
from bench.cli import many, start, teaching_parser
from bench.common.tables import markdown
from bench.results import kept
from bench.sim.job import Job, Plain, RunRecord
from bench.sim.runner import run

# --- what was measured on GPUs: mean completion time of eight-turn programs, in seconds ------
# The published sweep: Llama 3.1 8B in bf16, vLLM 0.10 and forks of its time, seed 42, programs per
# second (JPS) 1 to 15; `large DRAM` runs of 2026-04-12. What was not published is left out. And the
# machine of our own runs of its programs, with vLLM 0.26.0 (bench/results/gpu.json).
Table = dict[str, dict[int, float]]  # GPU -> JPS -> seconds

FCFS: Table = {
    "H200": {1: 8.55, 3: 28.11, 6: 192.15, 10: 416.92, 15: 702.50},
    "H100": {1: 9.01, 3: 68.85, 6: 244.07, 10: 456.30, 15: 739.24},
    "A100-40": {1: 45.00, 3: 415.14, 6: 943.54},
    "L40S": {1: 134.55, 3: 501.28, 6: 1045.63, 10: 1834.86, 15: 3374.62},
}
CONTINUUM: Table = {
    "H200": {1: 8.67, 3: 20.67, 6: 66.00, 10: 119.39, 15: 185.08},
    "H100": {1: 8.75, 3: 39.75, 6: 100.38, 10: 172.89, 15: 259.52},
    "L40S": {1: 68.55},
}
# Mean seconds of a program's first and last turn: policy -> JPS -> (turn 1, turn 8), H200 only.
ENDS = {
    "FCFS": {3: (1.461, 3.118), 6: (6.804, 30.812), 10: (16.019, 72.917), 15: (21.347, 133.549)},
    "Continuum": {3: (0.933, 2.307), 6: (17.877, 4.878), 10: (19.940, 5.237), 15: (27.922, 5.225)},
}
# Of Continuum's second turn, the spike: GPU -> JPS -> seconds.
SECOND_TURN: Table = {"H200": {10: 54.9, 15: 110.6}, "H100": {6: 34.5, 10: 85.9, 15: 155.5}}
# What LMCache was given there, in GB.
DRAM_GB = {"H200": 400, "H100": 400, "A100-40": 200, "L40S": 100}

OUR_WINDOW_S = {2: 20, 3: 15}  # JPS -> seconds in which programs arrive
OUR_MACHINE: dict[str, Plain] = {
    "gpu": "H200",
    "kv_tokens": 159_984,  # 10,000 blocks of 16, less vLLM's null block
    "block_size": 16,
    "dram_gb": 27.917287424,  # 26 GiB
}

# --- beside what the lab makes of it ----------------------------------------------------------
README = Path(__file__).with_name("README.md")
FINDINGS = README.with_name("FINDINGS.md")
TEACH = """
Each cell is  measured / simulated / ratio  (simulated by measured), seconds of mean JCT; `-` was
not published. The last line of a column is its rms log error: 0.10 is off by 10 % either way.

  python -m bench.sim.validate                  all cells; what is in the file is not run again
  python -m bench.sim.validate --write          and put the tables into README.md and FINDINGS.md
"""


def jct(record: RunRecord) -> float:
    """Mean completion time of a program, seconds."""
    return fmean(record.jct_s.values())


def turn_s(record: RunRecord, number: int) -> float:
    """Mean seconds of the programs' turn of that number, from 1 on."""
    return fmean(t.finished - t.arrived for t in record.turns if t.index == number - 1)


def last_to_first(record: RunRecord) -> float:
    """T8/T1: how much longer than a program's first turn its last one takes."""
    return turn_s(record, 8) / turn_s(record, 1)


def second_turn(record: RunRecord) -> float:
    return turn_s(record, 2)


@dataclass(frozen=True)
class Column:
    """An arm of the lab held against a published table."""

    title: str
    arm: str
    table: Table
    of: Callable[[RunRecord], float] = jct


FORK = ("paper", "cont-pin", "released")
COLUMNS = (
    Column("FCFS: `stock` (fitted)", "stock", FCFS),
    *(Column(f"Continuum: `{arm}`", arm, CONTINUUM) for arm in FORK),
    Column("Continuum: `stock+order`", "stock+order", CONTINUUM),
)


def _ends(policy: str) -> Table:
    return {"H200": {rate: last / first for rate, (first, last) in ENDS[policy].items()}}


OF_TURNS = (
    Column("FCFS T8/T1: `stock`", "stock", _ends("FCFS"), last_to_first),
    *(Column(f"Continuum T8/T1: `{a}`", a, _ends("Continuum"), last_to_first) for a in FORK),
    *(Column(f"Continuum T2, s: `{arm}`", arm, SECOND_TURN, second_turn) for arm in FORK),
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


def validation(records: Mapping[str, RunRecord], columns: Sequence[Column] = COLUMNS) -> str:
    """The table of these columns, in Markdown. `records`: by the key of their job."""
    rows = []
    pairs: dict[str, list[tuple[float, float]]] = {column.title: [] for column in columns}
    for gpu in DRAM_GB:
        for rate in sorted({rate for column in columns for rate in column.table.get(gpu, {})}):
            rows.append([f"{gpu} {rate}"])
            for column in columns:
                measured = column.table.get(gpu, {}).get(rate)
                record = records.get(job(column.arm, gpu, rate).key)
                simulated = column.of(record) if measured and record else None
                rows[-1].append(_told(measured, simulated, pairs[column.title]))
    errors = [f"{log_error(each):.2f}" for each in pairs.values()]
    return markdown(["GPU, JPS", *pairs], [*rows, ["rms log error", *errors]])


def our_validation(records: Mapping[str, RunRecord]) -> str:
    """The table of our own runs, in Markdown."""
    rows, pairs = [], list[tuple[float, float]]()
    for (rate, seed), measured in our_runs().items():
        found = {arm: records.get(our_job(arm, rate, seed).key) for arm in OUR_ARMS}
        told = (
            _told(measured.get(arm), jct(record) if record else None, pairs)
            for arm, record in found.items()
        )
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
    parser.add_argument("--out", type=Path, default=Path("runs/validation.jsonl"))
    parser.add_argument("--workers", type=many, default=0, help="processes; default: one per core")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    outcome = run(_jobs(), args.out, num_workers=args.workers)
    records = {each.job.key: each.record for each in outcome.results if each.record is not None}
    tables = {"validation": validation(records), "our own": our_validation(records)}
    of_turns = {"turns": validation(records, OF_TURNS)}
    print("\n\n".join((*tables.values(), *of_turns.values())))
    print(outcome, file=sys.stderr)
    if args.write:
        markers.rewrite(README, tables)
        markers.rewrite(FINDINGS, of_turns)
    return outcome.exit_code


def _jobs() -> list[Job]:
    published = [
        job(column.arm, gpu, rate)
        for column in COLUMNS
        for gpu, rates in column.table.items()
        for rate in rates
    ]
    ours = [our_job(arm, *point) for point in our_runs() for arm in OUR_ARMS]
    return [*published, *ours]


if __name__ == "__main__":
    start(main, "python -m bench.sim.validate")
