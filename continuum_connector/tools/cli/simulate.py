"""`continuum simulate`: its options. The lab itself is bench/sim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from continuum_connector.tools.cli.bench import find_bench
from continuum_connector.tools.cli.reading import command
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import terminal

Arms = Annotated[str, typer.Option(help="Arms to compare; ratios are to the first.")]
Workload = Annotated[
    str, typer.Option(help="A name of --list, or a TOML file: workload = NAME, its options.")
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
    float,
    typer.Option(
        "--disk-gb-s", min=0.01, max=1e6, help="How fast it reads; it writes half as fast."
    ),
]
Tp = Annotated[int, typer.Option(min=1, max=1024, help="GPUs that share the model.")]
Seeds = Annotated[str, typer.Option(help="One run for each; figures cover all of them.")]
Sweep = Annotated[str, typer.Option(help="A sweep of --list, instead of all options above.")]
Out = Annotated[
    Path, typer.Option(help="Results, one line per run; it does not repeat runs in it.")
]
Report = Annotated[Path | None, typer.Option(help="Write a page with plots here.")]
Workers = Annotated[int, typer.Option(min=0, max=4096, help="Processes; 0: one per core.")]
ShowList = Annotated[
    bool, typer.Option("--list", help="List arms, workloads, GPUs, models, sweeps; then end.")
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

    Prints a table per point; ratios are to the first arm. The same command
    continues a stopped run from --out; runs by other code are done anew.

    [bold]Examples[/]

    [bold]continuum simulate[/]  three arms, one load: under a minute

    [bold]continuum simulate --arms stock,adaptive --rates 1,3,6,10,15 --report report.html[/]

    [bold]continuum simulate --gpu L40S,H100 --dram-gb 100 --pcie-gb-s 12 --seeds 42,43,44[/]

    [bold]continuum simulate --workload agents --set gaps=coding --set turns=12[/]

    [bold]continuum simulate --sweep published --report published.html[/]
    """
    with command("simulate"):
        lab = find_bench("bench.sim.command")
        if show_list:
            lab.listing(terminal())
            return
        machine = (gpu, model, dram_gb, pcie_gb_s, (disk_gb, disk_rate), tp)
        files = (out, report, workers)
        given = lab.Options(arms, workload, settings, rates, *machine, seeds, sweep, *files)
        try:
            status = lab.simulate(given, terminal())
        except lab.UserError as error:
            raise CommandError(str(error)) from None
        raise typer.Exit(status)
