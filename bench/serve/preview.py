"""`continuum bench ab --dry-run`: every server that would be started, and for how long.

It asks what the runner itself asks (`ab.prepare`), so what it shows is what would run. Nothing is
started, and nothing is written into the result folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.serve import package, results
from bench.serve.ab import Cell, Experiment, cells, check_folder, is_done, prepare
from bench.serve.arms import CannotRunError
from bench.serve.kept import Prepared
from bench.serve.live import longest_context
from bench.serve.load import Load
from bench.serve.router import Router
from bench.serve.server import free_port

START_STOP_S = 60.0  # assumed where no run is done yet; 24 s were measured with the tiny model
STEERING = ("VLLM_", "CONTINUUM_", "LMCACHE_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_")
SECRET = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")  # names that end so: what is shown gets pasted


def preview(loads: Mapping[Path, Experiment]) -> Iterator[str]:
    """Line by line; ResultError, as the run itself, where it would not begin."""
    start_s = START_STOP_S
    for out, experiment in loads.items():
        planned = cells(experiment)
        check_folder(experiment, out)
        load = experiment.load(experiment.arms[0], 0)
        yield from _load(experiment, load)
        prepared = {cell: _try(experiment, cell) for cell in planned if not cell.repeat}
        # All repeats of a cell start the same.
        runs = [cell for cell in planned if isinstance(prepared[replace(cell, repeat=0)], Prepared)]
        yield from _time(load, runs, out, start_s)
        start_s = 0.0  # their servers are there by then
    yield from _shared(experiment)
    for cell, what in prepared.items():
        yield from _arm(experiment, cell, what)


# --- the load, and how long -----------------------------------------------------------------
def _load(experiment: Experiment, load: Load) -> Iterator[str]:
    programs = load.most_programs() or 0
    turns = sum(len(load.plan(number).turns) for number in range(programs))
    yield (
        f"Load: {experiment.workload.name}, {load.arrivals.text}, seed {load.tokens.seed}: "
        f"{programs} programs, {turns:,} turns, contexts up to {longest_context(load):,} tokens"
    )
    if client := experiment.client.settings():
        yield f"Client: {', '.join(client.values())}"
    for dram in experiment.drams():
        yield (
            f"DRAM: {_size(dram.bytes)} for every arm that uses it; live KV of {dram.whose}: "
            f"{_size(dram.live_bytes)}; live KV / DRAM = {dram.pressure:.3g}"
        )


def _time(load: Load, planned: Sequence[Cell], out: Path, start_s: float) -> Iterator[str]:
    """From the runs that are done, else what arrivals and tools take at least."""
    folders = [out / results.RUNS / cell.name for cell in planned]
    done = [results.read_run(folder) for folder in folders if is_done(folder)]
    left = len(planned) - len(done)
    yield f"Runs: {len(planned)}, {len(done)} of them done in {out}"
    if done:
        mean_s = sum(run.server_start_s + run.wall_s for run in done) / len(done)
        yield f"Time: {_minutes(left * mean_s)} more, as the {len(done)} that are done"
        return
    least_s = _least_s(load)
    yield (
        f"Time: at least {_minutes(left * (least_s + start_s))}: each run {least_s:.0f} s of "
        f"arrivals and tools, and {start_s:.0f} s (a guess) to start and stop its server. "
        "Servers that fall behind take longer; after the first runs this says how long"
    )


def _least_s(load: Load) -> float:
    """Seconds that a load takes on a server that takes none; 0 where only the server counts."""
    programs = load.most_programs() or 0
    pauses = [sum(turn.gap_s for turn in load.plan(n).turns) for n in range(programs)]
    if load.arrivals.open_loop:
        return max(map(sum, zip(load.arrivals.times_s, pauses, strict=False)))
    return sum(pauses) / load.arrivals.at_once if load.arrivals.at_once else 0.0


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"


# --- what would be started ------------------------------------------------------------------
def _try(experiment: Experiment, cell: Cell) -> Prepared | CannotRunError:
    try:
        return prepare(experiment, cell)
    except CannotRunError as error:
        return error


def _shared(experiment: Experiment) -> Iterator[str]:
    """What every server's environment has, beside the rest of the caller's."""
    device = "CPUs" if package.on_cpu() else "GPUs"
    yield f"vLLM here is built for {device}. Ports are free ones of now; each run takes its own"
    added = _beyond(experiment.server.environment(), os.environ)
    yours = {name: text for name, text in os.environ.items() if name.startswith(STEERING)}
    yield f"Every server's environment: yours, and {_assigned(added)}"
    if kept := _assigned({name: text for name, text in yours.items() if name not in added}):
        yield f"Of yours it sees: {kept}"


def _arm(experiment: Experiment, cell: Cell, prepared: Prepared | CannotRunError) -> Iterator[str]:
    dram = f" with {_size(cell.dram.bytes)} of DRAM" if cell.dram else ""
    yield ""
    if isinstance(prepared, CannotRunError):
        yield f"# {cell.arm.name} cannot run: {prepared}"
        return
    yield f"# {cell.arm.name}{dram}"
    options, side = prepared.options, prepared.side
    if side is not None:
        yield _line(side.env, side.command) + " &"
    own = _beyond(options.environment(), experiment.server.environment())
    port = free_port()
    behind = " &" if prepared.front else ""
    yield _line(own, options.command(experiment.model, port)) + behind
    if prepared.front:
        log = Path(os.devnull)
        yield _line({}, Router([f"http://127.0.0.1:{port}"], prepared.front, log).command)


def _beyond(environment: dict[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """What differs from `base`; nothing is ever taken away."""
    return {name: text for name, text in environment.items() if base.get(name) != text}


def _line(env: dict[str, str], command: Sequence[str]) -> str:
    return " ".join(filter(None, (_assigned(env), shlex.join(command))))


def _assigned(env: dict[str, str]) -> str:
    return " ".join(f"{name}={_shown(name, text)}" for name, text in sorted(env.items()))


def _shown(name: str, text: str) -> str:
    return "..." if name.endswith(SECRET) else shlex.quote(text)


def _size(num_bytes: int) -> str:
    small = num_bytes < 2**30
    return f"{num_bytes / (2**20 if small else 2**30):.3g} {'MiB' if small else 'GiB'}"
