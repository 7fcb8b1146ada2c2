"""`continuum bench`, `continuum simulate`: they hand over to bench/serve and to the lab, bench/sim.

The source tree has `bench` beside the package. A wheel has it inside, because a top-level package
of that name could clash with others.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import terminal

PACKAGE = Path(__file__).parents[2]
# Options and help are those of bench/serve.
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def bench(context: typer.Context) -> None:
    """Put agents on a server, compare ways to serve, compare results."""
    commands = find_bench("bench.serve.commands")
    commands.app(args=context.args, prog_name="continuum bench")


def find_bench(module: str) -> Any:
    """Import a module of `bench`. CommandError says what is missing."""
    file = Path(*module.split(".")).with_suffix(".py")
    for home in (PACKAGE.parent, PACKAGE / "_bench"):
        if (home / file).is_file():
            sys.path.insert(0, str(home))
            return _import(module)
    raise CommandError(
        f"{module} is not there, so this installation is not whole; install it again: "
        "pip install --force-reinstall --no-deps . in a clone"
    )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"this needs the package {error.name}, which is not installed; all but vLLM comes "
            "with: pip install '.[bench]' in a clone"
        ) from None


Arms = Annotated[str, typer.Option(help="What is compared; ratios are to the first.")]
Workload = Annotated[
    str, typer.Option(help="A name of --list, a TOML file with one and its options, or a trace.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the workload: NAME=VALUE.")
]
Rates = Annotated[str, typer.Option(help="Programs that arrive per second.")]
Gpu = Annotated[str, typer.Option(help="One or more of --list.")]
Model = Annotated[str, typer.Option(help="One or more of --list.")]
Dram = Annotated[float, typer.Option(min=0, max=1e9, help="DRAM for offloaded blocks.")]
Pcie = Annotated[
    float | None, typer.Option(min=0.1, max=1e6, help="PCIe instead of the GPU's own.")
]
Disk = Annotated[float, typer.Option(min=0, max=1e9, help="A disk for what leaves DRAM; 0: none.")]
DiskRate = Annotated[
    float, typer.Option("--disk-gb-s", min=0.01, max=1e6, help="It reads; it writes half as fast.")
]
Tp = Annotated[int, typer.Option(min=1, max=1024, help="GPUs that share the model.")]
Seeds = Annotated[str, typer.Option(help="A run for each; figures are of all together.")]
Sweep = Annotated[str, typer.Option(help="A sweep of --list, instead of all options above.")]
Out = Annotated[Path, typer.Option(help="Results, a line per run; what it has is not run again.")]
Report = Annotated[Path | None, typer.Option(help="Write a page with tables here.")]
Workers = Annotated[int, typer.Option(min=0, max=4096, help="Processes; 0: one per core.")]
ShowList = Annotated[
    bool, typer.Option("--list", help="Arms, workloads, GPUs, models, sweeps; then end.")
]


def simulate(
    arms: Arms = "stock,stock+order,adaptive",
    workload: Workload = "eight_turns",
    settings: Settings = None,
    rates: Rates = "3",
    gpu: Gpu = "H100",
    model: Model = "llama-8b",
    dram_gb: Dram = 400.0,
    pcie_gb_s: Pcie = None,
    disk_gb: Disk = 0.0,
    disk_rate: DiskRate = 7.0,
    tp: Tp = 1,
    seeds: Seeds = "42",
    sweep: Sweep = "",
    out: Out = Path("runs/simulate.jsonl"),
    report: Report = None,
    workers: Workers = 0,
    show_list: ShowList = False,
) -> None:
    """What would a policy do, on a GPU and a load that are not here?

    Plays agents against vLLM's own scheduler and block pool with each arm's connector, in virtual
    time: who is admitted, cached, stored, loaded and evicted is real; how long steps and copies
    take is modelled. Same options, same numbers, on any machine.

    Prints a table per point; ratios are to the first arm. A run that was stopped goes on
    from --out with the same command; runs by other code are done anew.

    \b
    Examples (the first: three arms, one load, under a minute):
      continuum simulate
      continuum simulate --arms stock,adaptive --rates 1,3,6 --report r.html
      continuum simulate --gpu L40S,H100 --dram-gb 100 --pcie-gb-s 12
      continuum simulate --workload agents --set gaps=coding --set turns=12
      continuum simulate --workload TRACE --set scale=1 --report r.html
      continuum simulate --sweep published --report published.html
    """
    lab = find_bench("bench.sim.command")
    if show_list:
        lab.listing(terminal())
        return
    machine = (gpu, model, dram_gb, pcie_gb_s, (disk_gb, disk_rate), tp)
    files = (out, report, workers)
    given = lab.Options(arms, workload, settings, rates, *machine, seeds, sweep, *files)
    raise typer.Exit(lab.simulate(given, terminal()))
