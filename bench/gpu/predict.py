"""What the lab says of each arm of the sweep before a card does, so that the card judges the lab.

`python -m bench.gpu --predict` writes predicted.json, with its date; `--write` puts it beside what
was found.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common.tables import mean, quantile
from bench.gpu.steps import BLOCKS, DRAM, SIZES
from bench.sim.job import Job
from bench.sim.pool import Pool
from bench.sim.result import RunRecord
from continuum_connector.sizes import parse_bytes
from continuum_connector.tools.cli.ending import ToldError

PREDICTED = Path(__file__).with_name("predicted.json")
SEED = 42
KEYS = ("gpu", "arm", "programs", "rate")  # of a job's parameters
IN_LAB = {
    "none": "stock",
    "none-priority": "stock+order",
    "continuum:adaptive": "adaptive",
    "continuum:fixed_ttl": "fixed_ttl",
    "simple": "simple",
}  # LMCache's server is not modelled


def predict(gpus: str) -> Path:
    """Play every arm of every plan on these GPUs and write it down; minutes of a core."""
    told: dict[str, Any] = {}
    with Pool(play, 1) as lab:
        for result in lab.play_all([*_jobs(gpus.split(","))]):
            if result.record is None:
                raise ToldError(f"{result.job}: {result.error}")
            gpu, arm, programs, rate = (str(result.job.params[key]) for key in KEYS)
            print(f"{gpu} {programs} programs, {rate}/s, {arm}: done", flush=True)
            of_arm = told.setdefault(gpu, {}).setdefault(programs, {}).setdefault(arm, {})
            of_arm[rate] = _figures(result.record)
    said = {"date": time.strftime("%Y-%m-%d"), "gpus": told}
    PREDICTED.write_text(json.dumps(said, indent=1) + "\n")
    return PREDICTED


def _jobs(gpus: Sequence[str]) -> Iterator[Job]:
    for gpu, size in itertools.product(gpus, SIZES):
        for arm, rate in itertools.product(size.arms, size.rates):
            if arm not in IN_LAB:
                continue
            params = dict(zip(KEYS, (gpu, arm, size.programs, rate), strict=True))
            yield Job(IN_LAB[arm], "eight_turns", params, seed=SEED)


def play(job: Job) -> RunRecord:
    """As many programs as the plan has, on its machine."""
    from bench.sim.arms import ARMS
    from bench.sim.hardware import machine
    from bench.sim.lab import Lab
    from bench.sim.workloads.registry import at_rate

    gpu, _, programs, rate = (job.params[key] for key in KEYS)
    dram_gb = parse_bytes(DRAM) / 1e9
    on = machine(str(gpu), kv_tokens=(BLOCKS - 1) * 16, block_size=16, dram_gb=dram_gb)
    window_s = 4 * programs / rate + 60  # long enough for so many to arrive
    load = at_rate(job.workload, {"rate": float(rate), "window_s": window_s}, job.seed)
    return Lab(on, ARMS[job.arm], replace(load, programs=load.programs[:programs])).play()


def _figures(record: RunRecord) -> dict[str, float]:
    jct_s = [*record.jct_s.values()]
    return {
        "mean_s": round(mean(jct_s), 2),
        "p95_s": round(quantile(jct_s, 0.95), 2),
        "first_turns_s": round(_first(record), 3),
        "t8_t1": round(_seconds(record, -1) / _seconds(record, 0), 2),
    }


def _first(record: RunRecord) -> float:
    return mean([turn.first_token - turn.arrived for turn in record.turns if not turn.index])


def _seconds(record: RunRecord, number: int) -> float:
    """What the turn of that number, or the last, takes on average."""
    at = number % (1 + max(turn.index for turn in record.turns))
    return mean([turn.finished - turn.arrived for turn in record.turns if turn.index == at])


def predicted(machine: str, programs: str, arm: str) -> str:
    """What was said of this arm and so many programs on the card that a machine's line names; ""
    where nothing was."""
    told = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {"gpus": {}}
    gpu = next((name for name in told["gpus"] if name in machine), "")
    rates = told["gpus"].get(gpu, {}).get(programs, {}).get(arm, {})
    each = [f"{rate}/s: {_told(figures)}" for rate, figures in rates.items()]
    return f"{'; '.join(each)} ({told['date']})" if each else ""


def _told(figures: dict[str, float]) -> str:
    """As steps.py tells what was found."""
    jct = f"JCT {figures['mean_s']:.1f} (P95 {figures['p95_s']:.1f}) s"
    return f"{jct}, first turns {figures['first_turns_s']:.2f} s, T8/T1 {figures['t8_t1']:.2f}"
