"""`continuum bench`: agents on a server, several ways to serve side by side, results compared.

Also `python -m bench.serve.commands`, where the package is not installed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from bench.serve import options as o
from bench.serve import results
from bench.serve.arms import DEFAULT
from bench.serve.rivals import FOLDER
from bench.serve.server import ServerOptions
from continuum_connector.tools.cli import ending
from continuum_connector.tools.cli.terminal import Commands, terminal

app = typer.Typer(
    help=__doc__.splitlines()[0],
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
EVERY_ARM = ",".join(DEFAULT)


@app.command()
def agents(
    url: o.Url,
    workload: o.Workload = "sweep",
    arrivals: o.ArrivalsText = "",
    duration: o.Duration = 0,
    programs: o.Programs = 0,
    seed: o.Seed = 42,
    out: o.Out = None,
    model: o.ModelName = "",
    hints: o.Hints = True,
    reset: o.Reset = False,
    api_key: o.ApiKey = "",
) -> None:
    """Put multi-turn agents on a running server and measure.

    Each program sends its context as token ids, reads the streamed answer, runs its tool (a
    real pause) and sends the longer context again. JCT counts from the moment a program should
    have begun, so a client or server that is late cannot hide it; retries and timeouts count.

    Ctrl-C stops the programs and keeps what was measured.

    \b
    Examples:
      continuum bench agents http://localhost:8000 --arrivals poisson:3
      continuum bench agents http://localhost:8000 --workload mine.toml
      continuum bench agents http://localhost:8000 --workload claude-code:FILE
    """
    # Whatever needs more than Python is imported by who needs it.
    from bench.serve import cli_agents
    from bench.serve.arrivals import read_arrivals
    from bench.serve.load import Load
    from bench.serve.session import Manner
    from bench.serve.token_ids import Tokens
    from bench.serve.workloads import find_workload

    chosen = find_workload(workload)
    seconds = duration or chosen.defaults.duration_s
    most = programs or chosen.defaults.programs
    times = read_arrivals(arrivals or chosen.defaults.arrivals, seed, seconds, most)
    name = cli_agents.find_model(url, api_key, model)
    load = Load(chosen, times, Tokens(seed), name, seconds, most, hints)
    manner = Manner(reset=reset, api_key=api_key)
    _end(cli_agents.run(url, load, manner, out or _folder("agents")))


@app.command()
def ab(
    arms: o.ArmNames = EVERY_ARM,
    workload: o.Workload = "pressure",
    arrivals: o.ArrivalsText = "",
    rates: o.Rates = "",
    duration: o.Duration = 0,
    programs: o.Programs = 0,
    dram: o.DramText = "2",
    disk: o.DiskText = "4GiB",
    disk_path: o.DiskPath = None,
    repeats: o.Repeats = 1,
    seed: o.Seed = 42,
    out: o.Out = None,
    model: o.ModelFolder = None,
    dtype: o.Dtype = "float32",
    blocks: o.Blocks = 17,
    block_size: o.BlockSize = 128,
    batch_tokens: o.BatchTokens = 1024,
    seqs: o.Seqs = 16,
    max_len: o.MaxLen = 0,
    eager: o.Eager = True,
    server_args: o.ServerArgs = "",
    shims: o.Shims = None,
    rivals: o.Rivals = None,
    start_timeout: o.StartTimeout = ServerOptions.start_timeout_s,
    client: o.ClientName = "agents",
    dry_run: o.DryRun = False,
) -> None:
    """Put the same agents on a server for each way to serve; compare.

    It starts the servers itself, with the same model, VRAM pool, DRAM and requests for all arms;
    arms in alternating order; ratios in pairs, from 5 repeats on with a 95 % interval; every answer
    compared token for token; server logs kept. An arm that cannot run here is listed with its
    reason.

    Ctrl-C stops the server and keeps what was measured; the same command goes on from there.

    \b
    Examples:
      continuum bench ab --arms none,continuum,lmcache-mp --repeats 5
      continuum bench ab --arms none,router+none,continuum --arrivals closed:6
      continuum bench ab --dram 0.5,1,2,4 --out runs/sweep --dry-run
      continuum bench ab --workload sweep --rates 1,3,6 --dram 64GiB
      continuum bench ab --client aiperf --workload claude-code:FILE,scale=16
    """
    from bench.serve import cli_ab
    from bench.serve.ab import DISK, Experiment
    from bench.serve.load import find_client
    from bench.serve.preview import preview
    from bench.serve.tiny_model import make_model
    from bench.serve.workloads import find_workload

    server = ServerOptions(blocks, block_size, max_len, seqs, batch_tokens, dtype, eager)
    server.args, server.start_timeout_s = cli_ab.read_server_args(server_args), start_timeout
    source, (pressures, dram_bytes) = find_workload(workload), cli_ab.read_dram(dram)
    folder = model or make_model()
    chosen = Experiment(
        arms=cli_ab.read_arms(arms),
        workload=source,
        model=folder,
        pressures=pressures,
        dram_bytes=dram_bytes,
        server=server,
        client=find_client(client, folder, block_size),
        arrivals=arrivals,
        duration_s=duration,
        programs=programs,
        repeats=repeats,
        seed=seed,
        shims=shims,
        rivals=rivals or FOLDER,
        disk=disk_path or DISK,
        disk_bytes=cli_ab.read_size("--disk", disk),
    )
    loads = cli_ab.read_rates(rates, chosen, out or _folder("ab"))
    if dry_run:
        for line in preview(loads):
            print(line)
    else:
        _end(cli_ab.run(loads))


@app.command()
def compare(first: o.Result, second: o.Result) -> None:
    """Compare two result folders.

    Ratios are second / first, in pairs where they got the same requests: below 1 the second is
    faster. In brackets the 95 % interval, from 5 repeats on. Arms that only one of them has are
    left out.
    """
    from bench.serve import compare as comparison

    made = [comparison.columns(results.load(each)) for each in (first, second)]
    for base, other in comparison.matching(*made):
        title = base.title if base.title == other.title else f"{base.title}, {other.title}"
        console = terminal(width=None if sys.stdout.isatty() else 160)
        for table in comparison.tables(console, title, [base, other]):
            console.print(table)


@app.command()
def report(folders: o.Results, out: o.Page = None) -> None:
    """Write one HTML file about a result folder, in tables.

    `bench ab` does it by itself at its end. Several folders that differ in nothing but their
    load become one page, with the JCT at each load. The file needs nothing else, and follows the
    reader's light or dark.

    \b
    Examples:
      continuum bench report runs/ab
      continuum bench report runs/jps-1 runs/jps-3 runs/jps-6 -o jps.html
    """
    from bench.serve.page import write

    path = write(folders, out)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _end(state: results.State) -> None:
    if state == "interrupted":
        raise typer.Exit(ending.STOPPED)


def _folder(kind: str) -> Path:
    return Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")


if __name__ == "__main__":
    app(prog_name="continuum bench")
