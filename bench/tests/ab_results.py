"""A made-up result of `continuum bench ab`, as the runner would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serve import results
from bench.serve.record import RunFolder
from bench.serve.results import Dram, Program, Run, Turn

FACTORS = {"none": 1.0, "lmcache-mp": 0.8, "lmcache-mp-lazy": 0.7, "continuum:adaptive": 0.5}
LIVE, PROGRAMS, TURNS, TOKENS = 64 * 2**20, 5, 3, 1000
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def settings(arrivals: str = "turns") -> dict[str, Any]:
    return {
        "workload": "pressure",
        "arrivals": arrivals,
        "programs": PROGRAMS,
        "seed": 42,
        "dtype": "float32",
        "blocks": 17,
        "block_size": 128,
    }


def run_of(arm: str, pressure: float = 0.0, repeat: int = 0, **fields: Any) -> Run:
    """The record of a run that has not begun."""
    dram = Dram(bytes=int(LIVE / pressure), live_bytes=LIVE) if pressure else None
    defaults: dict[str, Any] = {
        "settings": settings(),
        "workload": "pressure",
        "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
        "machine": {"system": "Linux <x86>", "cores": "2", "load_before": "1.0"},
        "command": ["vllm", "serve", "a model", arm],
        "started": "2026-11-21T20:00:00",
        "planned_programs": PROGRAMS,
        "wall_s": 20.0,
    }
    name = f"{repeat + 1:02d}-{arm.replace(':', '-')}-{pressure:g}x"
    order = 10 * repeat + [*FACTORS, arm].index(arm)
    known = {"name": name, "arm": arm, "title": arm, "repeat": repeat, "order": order}
    return Run(dram=dram, **(known | defaults | fields))


def measured(
    root: Path,
    run: Run,
    factor: float,
    answer: int = 7,
    gaps_ms: Sequence[float] = (),
    programs: int = PROGRAMS,
    failed: int = 0,
) -> Path:
    """A run of programs that took `factor` times as long, and computed so much of them; the last
    `failed` of them fail at their end."""
    folder = root / results.RUNS / run.name
    with RunFolder(folder, run) as out:
        out.metrics(results.BEFORE, _metrics(0.0, 1.0))
        for number in range(programs):
            name, seconds = f"p{number}", (1 + number + 3 * run.repeat) * factor
            for index in range(TURNS):
                out.turn(
                    Turn(
                        program=name,
                        turn=index,
                        start_s=index * seconds,
                        latency_s=seconds,
                        ttft_s=seconds / 2,
                        tpot_s=0.01 * factor,
                        gaps_ms=[*gaps_ms],
                        prompt_tokens=TOKENS,
                        cached_tokens=int(TOKENS * (1 - factor)),
                        answer=[answer],
                    )
                )
            times = {"arrival_s": 0.0, "start_s": 0.0, "jct_s": TURNS * seconds}
            error = "timeout" if number >= programs - failed else ""
            out.program(
                Program(program=name, turns=TURNS, planned_turns=TURNS, error=error, **times)
            )
        run.wall_s = 4.5 * PROGRAMS * factor
        out.metrics(results.AFTER, _metrics(PROGRAMS * TURNS, factor))
        out.close("done")
    return folder


def _metrics(turns: float, factor: float) -> str:
    tokens = turns * TOKENS
    told = (tokens * factor, tokens * (1 - factor) / 4, tokens * (1 - factor) * 3 / 4)
    return "".join(
        f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {value}\n'
        for source, value in zip(SOURCES, told, strict=True)
    )


def experiment(
    root: Path, pressures: tuple[float, ...] = (2.0,), repeats: int = 2, **fields: Any
) -> Path:
    """Every arm at every pressure; more pressure, more computed. One arm cannot run."""
    for repeat in range(repeats):
        for arm, factor in FACTORS.items():
            for pressure in pressures if arm != "none" else (0.0,):
                share = factor ** (1 / (1 + pressure)) if pressure else factor
                measured(root, run_of(arm, pressure, repeat, **fields), share)
    run = run_of("simple", 2.0)
    with RunFolder(root / results.RUNS / run.name, run) as out:
        out.close("cannot_run", "it copies with <CUDA>, and there is none here")
    return root
