"""The lab's results as those of real servers are told: one table for both.

A run of the lab becomes a run of a server (serve/results.py): its seconds are virtual, its seed is
its repeat, and what vLLM would count in /metrics is what its scheduler was seen to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.serve.compare import Point, points_of
from bench.serve.metrics import Metrics
from bench.serve.results import Loaded, Program, Run, Turn
from bench.serve.summary import PROMPT
from bench.sim.job import Job, Result, RunRecord, TurnRecord

GB = 1e9
LOAD = "rate"  # the parameter that a sweep goes along
NOWHERE = Path()
WORDS = {  # of a machine; what is none of these is called by its name
    "gpu": "{}",
    "model": "{}",
    "dram_gb": "{} GB DRAM",
    "pcie_gb_s": "PCIe {} GB/s",
    "disk_gb": "disk of {} GB",
    "disk_gb_s": "which reads {} GB/s",
}


def points(results: Iterable[Result]) -> list[Point]:
    """What is done, by point; arms as they come, the first is what others are compared with."""
    runs = [loaded(each.job, each.record) for each in results if each.record is not None]
    return points_of(runs, "")


def loaded(job: Job, record: RunRecord) -> Loaded:
    """A run as one of a server."""
    load = job.params.get(LOAD)
    settings = {"scene": scene(job)}
    if isinstance(load, int | float):
        settings["arrivals"] = f"poisson:{load:g}"
    run = Run(name=str(job), arm=job.arm, title=job.arm, repeat=job.seed, settings=settings)
    run.state, run.wall_s, run.told = "done", record.span_s, _told(record)
    last_turns: dict[str, int] = {}
    for turn in record.turns:
        last_turns[turn.program] = turn.index + 1
    programs = [
        _program(name, jct_s, last_turns.get(name, 0)) for name, jct_s in record.jct_s.items()
    ]
    return Loaded(NOWHERE, run, [*map(_turn, record.turns)], programs, added=_added(record))


def scene(job: Job) -> str:
    """All of a job but its load, its arm and its seed, as people say it."""
    machine = (WORDS.get(key, key + " {}").format(_word(v)) for key, v in job.machine.items())
    told = (f"{key} {_word(value)}" for key, value in job.params.items() if key != LOAD)
    return ", ".join((*machine, job.workload, *told))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _turn(turn: TurnRecord) -> Turn:
    return Turn(
        program=turn.program,
        turn=turn.index,
        start_s=turn.arrived,
        latency_s=turn.finished - turn.arrived,
        ttft_s=turn.first_token - turn.arrived,
        prompt_tokens=turn.num_prompt,
        cached_tokens=turn.num_local + turn.num_external,
    )


def _program(name: str, jct_s: float, num_turns: int) -> Program:
    times = {"arrival_s": 0.0, "start_s": 0.0, "jct_s": jct_s}  # when it came is not kept
    return Program(program=name, turns=num_turns, planned_turns=num_turns, **times)


def _told(record: RunRecord) -> dict[str, float]:
    moved = {
        "stored_gb": record.stored_bytes,
        "loaded_gb": record.loaded_bytes,
        "written_gb": record.written_bytes,
        "read_gb": record.read_bytes,
    }
    busy = 100 * record.busy_s / record.span_s if record.span_s else 0.0
    return {**{name: num_bytes / GB for name, num_bytes in moved.items()}, "busy_pct": busy}


def _added(record: RunRecord) -> Metrics:
    """By the names of vLLM's /metrics."""
    found = {
        "local_compute": record.num_computed_tokens,
        "local_cache_hit": record.num_local_tokens,
        "external_kv_transfer": record.num_external_tokens,
    }
    return {
        (PROMPT, frozenset({("source", source)})): float(number) for source, number in found.items()
    }
