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
from bench.serve.router import Router
from bench.serve.server import free_port
from continuum_connector.memory import size


def preview(loads: Mapping[Path, Experiment]) -> Iterator[str]:
    """Line by line; ResultError, as the run itself, where it would not begin."""
    for out, experiment in loads.items():
        planned = cells(experiment)
        check_folder(experiment, out)
        yield from _load(experiment)
        prepared = {cell: _try(experiment, cell) for cell in planned if not cell.repeat}
        # All repeats of a cell start the same.
        first = [prepared[replace(cell, repeat=0)] for cell in planned]
        runs = [c for c, what in zip(planned, first, strict=True) if isinstance(what, tuple)]
        yield from _time(runs, out)
    device = "CPUs" if package.on_cpu() else "GPUs"
    yield f"vLLM here is built for {device}. Ports are free ones of now; each run takes its own"
    shared = experiment.server.environment()
    yield f"Every server's environment: yours, and {_assigned(shared, os.environ)}"
    for cell, what in prepared.items():
        yield from _arm(experiment, cell, what)


def _load(experiment: Experiment) -> Iterator[str]:
    load = experiment.load(experiment.arms[0], 0)
    yield (
        f"Load: {experiment.workload.name}, {load.arrivals.text}, seed {load.tokens.seed}: "
        f"{load.most_programs()} programs, {load.num_turns():,} turns, contexts up to "
        f"{longest_context(load):,} tokens"
    )
    if client := experiment.client.settings():
        yield f"Client: {', '.join(client.values())}"
    for dram in experiment.drams():
        yield (
            f"DRAM: {size(dram.bytes)} for every arm that uses it; live KV: "
            f"{size(dram.live_bytes)}; live KV / DRAM = {dram.pressure:.3g}"
        )


def _time(planned: Sequence[Cell], out: Path) -> Iterator[str]:
    """How many runs there are, and how long they take, by those that are done."""
    folders = [out / results.RUNS / cell.name for cell in planned]
    done = [results.read_run(folder) for folder in folders if is_done(folder)]
    yield f"Runs: {len(planned)}, {len(done)} of them done in {out}"
    if done:
        mean_s = sum(run.server_start_s + run.wall_s for run in done) / len(done)
        left_s = (len(planned) - len(done)) * mean_s
        yield f"Time: {left_s / 60:.0f} minutes more, as the {len(done)} that are done"


def _try(experiment: Experiment, cell: Cell) -> Prepared | CannotRunError:
    try:
        return prepare(experiment, cell)
    except CannotRunError as error:
        return error


def _arm(experiment: Experiment, cell: Cell, prepared: Prepared | CannotRunError) -> Iterator[str]:
    dram = f" with {size(cell.dram.bytes)} of DRAM" if cell.dram else ""
    yield ""
    if isinstance(prepared, CannotRunError):
        yield f"# {cell.arm.name} cannot run: {prepared}"
        return
    yield f"# {cell.arm.name}{dram}"
    (options, setup), port = prepared, free_port()
    if (side := setup.side) is not None:
        yield f"{_assigned(side.env, {})} {shlex.join(side.command)} &"
    own = _assigned(options.environment(), experiment.server.environment())
    behind = " &" if setup.front else ""
    yield f"{own} {shlex.join(options.command(experiment.model, port))}{behind}".lstrip()
    if setup.front:
        log = Path(os.devnull)
        yield shlex.join(Router([f"http://127.0.0.1:{port}"], setup.front, log).command)


def _assigned(environment: Mapping[str, str], base: Mapping[str, str]) -> str:
    """What differs from `base`; nothing is ever taken away."""
    own = {name: text for name, text in sorted(environment.items()) if base.get(name) != text}
    return " ".join(f"{name}={shlex.quote(text)}" for name, text in own.items())
