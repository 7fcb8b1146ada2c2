"""What `continuum simulate` does: options to jobs, jobs to a table and a page."""

from __future__ import annotations

import importlib.util
import itertools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from typer import Option, Typer
from typer.main import get_command

from bench.serve import compare
from bench.sim import report, runner
from bench.sim.arms import ARMS
from bench.sim.hardware import GB, GPUS, MODELS, machine
from bench.sim.job import Job, Plain
from bench.sim.workloads.registry import RECORDED, WORKLOADS, at_rate
from continuum_connector.errors import ToldError


@dataclass(frozen=True)
class Options:
    """What would a policy do, on a GPU and a load that are not here?

    Plays agents against vLLM's own scheduler and block pool with each arm's connector, in virtual
    time: who is admitted, cached, stored, loaded and evicted is real; how long steps and copies
    take is modelled. Same options, same numbers, on any machine.

    Prints a table per point; ratios are to the first arm. A run that was stopped goes on
    from --out with the same command; runs by other code are done anew.

    \b
    Examples (the first: three arms, one load, under a minute):
      continuum simulate
      continuum simulate --arms stock,adaptive --rates 1,3,6
      continuum simulate --gpu L40S,H100 --dram-gb 100 --pcie-gb-s 12
      continuum simulate --workload agents --set gaps=coding --set turns=12
      continuum simulate --workload TRACE --set scale=1
    """

    arms: Annotated[str, Option(help="What is compared; ratios are to the first.")] = (
        "stock,stock+order,adaptive"
    )
    workload: Annotated[str, Option(help="A name of --list, or a trace.")] = "eight_turns"
    settings: Annotated[
        list[str] | None, Option("--set", help="An option of the workload: NAME=VALUE.")
    ] = None
    rates: Annotated[str, Option(help="Programs that arrive per second.")] = "3"
    gpu: Annotated[str, Option(help="One or more of --list.")] = "H100"
    model: Annotated[str, Option(help="One or more of --list.")] = "llama-8b"
    dram_gb: Annotated[float, Option(min=0, max=1e9, help="DRAM for offloaded blocks.")] = 400.0
    pcie_gb_s: Annotated[
        float | None, Option(min=0.1, max=1e6, help="PCIe instead of the GPU's own.")
    ] = None
    disk_gb: Annotated[
        float, Option(min=0, max=1e9, help="A disk for what leaves DRAM; 0: none.")
    ] = 0.0
    disk_gb_s: Annotated[
        float, Option(min=0.01, max=1e6, help="It reads; it writes half as fast.")
    ] = 7.0
    max_num_batched_tokens: Annotated[
        int | None, Option(min=1, max=1 << 20, help="vLLM's: tokens of a step; default: the GPU's.")
    ] = None
    max_num_seqs: Annotated[
        int | None, Option(min=1, max=1 << 20, help="vLLM's: requests of a step; the GPU's.")
    ] = None
    seeds: Annotated[str, Option(help="A run for each; figures are of all together.")] = "42"
    out: Annotated[Path, Option(help="Results, a line per run; what it has is not run again.")] = (
        Path("runs/simulate.jsonl")
    )
    workers: Annotated[int, Option(min=0, max=4096, help="Processes; 0: one per core.")] = 0
    show_list: Annotated[
        bool, Option("--list", help="Arms, workloads, GPUs, models; then end.")
    ] = False


app = Typer(add_completion=False, rich_markup_mode=None)
app.command("simulate")(Options)


def main(words: list[str], console: Console) -> int:
    """Do what these words of a command line ask for, and return the exit status."""
    given = get_command(app).main(words, "continuum simulate", standalone_mode=False)
    return simulate(given, console) if isinstance(given, Options) else int(given or 0)


def simulate(options: Options, console: Console) -> int:
    """Do what was asked for and return the exit status. Raises ToldError."""
    if options.show_list:
        listing(console)
        return 0
    jobs = list(asked(options))
    check(jobs)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    # Progress goes to stderr, so that what is piped is the tables.
    aside = Console(stderr=True) if console.file is sys.stdout else console
    try:
        outcome = runner.run(
            jobs, options.out, num_workers=options.workers, command=command, console=aside
        )
    except OSError as error:
        raise ToldError(str(error)) from None
    for point in report.points(outcome.results):  # `x`: over the first arm
        for shown in compare.tables(console, escape(point.title), point.columns):
            console.print(shown)
    console.print(escape(f"{outcome} Results: {options.out}"), highlight=False, soft_wrap=True)
    return outcome.exit_code


# --- jobs -----------------------------------------------------------------------------------
def asked(options: Options) -> Iterator[Job]:
    """Every arm at every point with every seed."""
    workload, params = _workload(options)
    points = itertools.product(
        _names(options.gpu), _names(options.model), _numbers("--rates", options.rates, float),
        _names(options.arms), _numbers("--seeds", options.seeds, int),
    )  # fmt: skip
    for gpu, model, rate, arm, seed in points:
        where: dict[str, Plain] = {"gpu": gpu, "model": model, "dram_gb": options.dram_gb}
        for name in ("pcie_gb_s", "max_num_batched_tokens", "max_num_seqs"):
            if (value := getattr(options, name)) is not None:
                where[name] = value
        if options.disk_gb:
            where |= {"disk_gb": options.disk_gb, "disk_gb_s": options.disk_gb_s}
        yield Job(arm, workload, {"rate": rate, **params}, where, int(seed))


def _workload(options: Options) -> tuple[str, dict[str, Plain]]:
    """A name, or a trace; and what --set says."""
    name, params = options.workload, dict[str, Plain]()
    if name not in WORKLOADS and Path(name).exists():
        name, params = RECORDED, {"file": name}
    for setting in options.settings or ():
        key, sign, value = setting.partition("=")
        if not sign:
            raise ToldError(f"--set {setting!r} should read name=value, like --set turns=12")
        params[key.strip()] = _plain(value.strip())
    return name, params


def _plain(text: str) -> Plain:
    """A value as TOML has it; what is none is a string."""
    import tomllib

    try:
        value: Plain = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        found = [kind(each) for each in _names(text)]
    except ValueError:
        raise ToldError(f"{option} {text!r} should be numbers, like 1,3,6") from None
    if option == "--rates" and any(rate <= 0 for rate in found):
        raise ToldError(f"{option} {text!r}: nobody would ever arrive; rates are above 0")
    return found


# --- is it possible -------------------------------------------------------------------------
def check(jobs: Sequence[Job]) -> None:
    """Before a long run: is everything there, and known?"""
    if importlib.util.find_spec("vllm") is None:
        raise ToldError(
            "the lab drives vLLM's own scheduler, and vLLM is not installed here; without a GPU: "
            "pip install '.[cpu]' in the clone"
        )
    if not jobs:
        raise ToldError("nothing to do: name at least one arm, rate, GPU, model and seed")
    _known("arm", [job.arm for job in jobs], ARMS)
    _known("workload", [job.workload for job in jobs], {**WORKLOADS, RECORDED: ""})
    _known("GPU", [str(job.machine["gpu"]) for job in jobs], GPUS)
    _known("model", [str(job.machine["model"]) for job in jobs], MODELS)
    try:
        for one in jobs:
            drive = machine(**one.machine).drive  # type: ignore[arg-type]
            if lacks := ARMS[one.arm].lacks(drive is not None):
                raise ToldError(f"{one.arm}: {lacks}; give --disk-gb")
    except ValueError as error:
        raise ToldError(str(error)) from None
    try:
        at_rate(jobs[0].workload, jobs[0].params, jobs[0].seed)  # the others differ in their rate
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        raise ToldError(f"workload {jobs[0].workload}: {error}") from None


def _known(kind: str, asked_for: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in dict.fromkeys(asked_for):
        if name not in known:
            raise ToldError(f"there is no {kind} {name!r}; there is {', '.join(known)}")


def listing(console: Console) -> None:
    """What can be asked for, a line each."""
    kinds = {
        "Arms": {arm.name: arm.title for arm in ARMS.values()},
        "Workloads": WORKLOADS,
        "GPUs": {
            name: f"{gpu.memory_bytes / GB:.0f} GB, PCIe {gpu.pcie_rate / GB:.0f} GB/s"
            for name, gpu in GPUS.items()
        },
        "Models": {
            name: f"{model.weight_bytes / GB:.0f} GB of weights, "
            f"{model.token_bytes / 1024:.0f} KiB of KV a token"
            for name, model in MODELS.items()
        },
    }
    for kind, lines in kinds.items():
        shown = Grid(title=kind, title_justify="left", box=None, show_header=False)
        for name, what in lines.items():
            shown.add_row(f"{escape(name):20}", escape(what))
        console.print(shown)
