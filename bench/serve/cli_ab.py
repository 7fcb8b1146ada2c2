"""`continuum bench ab`: what its options say, and from its runs to tables."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.serve import compare, results
from bench.serve import page as page_of_results
from bench.serve.ab import Experiment, run_all
from bench.serve.arms import ARMS, OURS, ServerArm, find_arm
from bench.serve.results import Loaded, State
from continuum_connector.config import POLICIES
from continuum_connector.errors import ConfigError, ToldError
from continuum_connector.memory import parse_bytes
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal

NOT_MEASURED = {"cannot_run": "cannot run", "died": "died, and is run again by the same command"}
# Here the experiment must know them too: whether contexts fit, how large a chunk may be.
OWN = {"--max-model-len": "--max-len", "--num-gpu-blocks-override": "--blocks"}
MOST_BYTES = 2**60


def read_arms(text: str) -> tuple[ServerArm, ...]:
    """The arms of these names; ToldError for a name that none has."""
    return tuple(map(_arm, text.split(",")))


def read_dram(text: str) -> tuple[tuple[float, ...], int]:
    """Pressures, and a size in bytes (0 if pressures were given)."""
    try:
        pressures = tuple(float(each) for each in text.split(","))
    except ValueError:
        return (1.0,), read_size("--dram", text, "live KV / DRAM, like 2 or 0.5,1,2,4, or ")
    if not all(1e-6 < each < 1e6 for each in pressures):
        raise ToldError(f"--dram {text}: live KV / DRAM is more than 0, like 2 or 0.5,1,2,4")
    return pressures, 0


def read_size(option: str, text: str, or_else: str = "") -> int:
    """Bytes; ToldError if that is no size. `or_else`: what may be written there, too."""
    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if not 0 < size < MOST_BYTES:
        raise ToldError(f"{option} {text}: write {or_else}a size, like 64GiB")
    return size


def read_server_args(text: str) -> list[str]:
    """More for every `vllm serve`; ToldError for what `bench ab` has an option of its own for.

    vLLM would take the last of two, and contexts would be checked against the first.
    """
    try:
        args = shlex.split(text)
    except ValueError as error:
        raise ToldError(f"--server-args cannot be split into words ({error})") from None
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if name in OWN:
            raise ToldError(f"--server-args: {name} is not taken here; use {OWN[name]}")
    return args


def read_rates(text: str, experiment: Experiment, out: Path) -> dict[Path, Experiment]:
    """The loads and their folders: one, or one per rate of arrivals."""
    if not text:
        return {out: experiment}
    if experiment.arrivals or not experiment.dram_bytes:
        raise ToldError(
            f"--rates {text}: it says the arrivals, and a server's DRAM is the same for all of "
            "them; leave out --arrivals and write --dram as a size, like 64GiB"
        )
    rates = text.split(",")
    return {out / f"rate-{rate}": replace(experiment, arrivals=f"poisson:{rate}") for rate in rates}


def run(loads: Mapping[Path, Experiment]) -> State:
    """Make the runs, tell what happens, print a table per pressure, write the page."""
    console = terminal(width=None if sys.stdout.isatty() else 160)
    # A `kill` stops the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    state = run_all(loads, lambda line: console.print(line, markup=False, soft_wrap=True))
    for out, experiment in loads.items():
        if found := results.load(out) if (out / results.RUNS).is_dir() else []:
            show(console, found, out, experiment.arms[0])
    return state


def show(console: Console, runs: list[Loaded], out: Path, base: ServerArm) -> None:
    """A table per pressure, what could not run, and where everything is."""
    for point in compare.points_of(runs, base.name):
        title = f"{point.title}; ratios are to {point.columns[0].title}"
        for table in compare.tables(console, title, point.columns):
            console.print(table)
    for each in runs:
        if each.run.state in NOT_MEASURED:
            line = f"{each.run.title} {NOT_MEASURED[each.run.state]}: {each.run.reason}"
            console.print(line, style="yellow", markup=False, soft_wrap=True)
    console.print(f"Written: {shown(str(out))}", soft_wrap=True)
    try:
        page = page_of_results.write([out], base=base.name)
    except ToldError as error:  # the runs are there all the same
        console.print(f"no report: {error}", style="yellow", markup=False, soft_wrap=True)
    else:
        console.print(f"Report: {shown(str(page))}", soft_wrap=True)


def _arm(name: str) -> ServerArm:
    try:
        return find_arm(name)
    except KeyError:
        ours = (f"{kind}:{policy}" for kind in OURS for policy in POLICIES)
        known = f"{', '.join((*ARMS, *ours))}, ours with +KEY=VALUE behind, "
        known += "and any with router+ or router:TOKENS+ before"
        raise ToldError(f"--arms: {name!r} is none of {known}") from None
    except ConfigError as error:
        raise ToldError(f"--arms {name}: {error}") from None
