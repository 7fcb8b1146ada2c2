"""`continuum bench`: agents on a server, several ways to serve side by side, two results compared.

Also `python -m bench.serve.commands`, where the package is not installed.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from bench.serve import compare as comparison
from bench.serve import results, summary
from bench.serve.api import ApiError, Patience
from bench.serve.arms import DEFAULT
from bench.serve.arrivals import ArrivalError, read_arrivals
from bench.serve.load import Load
from bench.serve.plans import Tokens
from bench.serve.progress import Progress
from bench.serve.record import RunFolder, machine, versions
from bench.serve.results import ResultError, Run
from bench.serve.server import ServerOptions
from bench.serve.session import Manner, measure
from bench.serve.workloads import WorkloadError, find_workload
from continuum_connector.cli.server import CommandError, Server

app = typer.Typer(
    help=__doc__.splitlines()[0],
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
ERRORS = (CommandError, ApiError, ArrivalError, WorkloadError, ResultError)

WorkloadOption = Annotated[
    str,
    typer.Option(
        help="sweep (8 turns to 13K tokens), pressure (6 x 4, one at a time), "
        "claude-code:FILE[,scale=8,pauses=8,longest=32768], or your own FILE.toml."
    ),
]
ArrivalsOption = Annotated[
    str,
    typer.Option(
        help="poisson:RATE, closed:PROGRAMS, trace:FILE or turns (one request at a time). "
        "Empty: what the workload says."
    ),
]


@app.command()
def agents(
    url: Annotated[str, typer.Argument(help="The server's address, like http://localhost:8000.")],
    workload: WorkloadOption = "sweep",
    arrivals: ArrivalsOption = "",
    duration: Annotated[
        float, typer.Option(min=0, help="Seconds in which programs begin. 0: the workload's.")
    ] = 0,
    programs: Annotated[int, typer.Option(min=0, help="At most so many. 0: no bound.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals, sizes, pauses and token ids.")] = 42,
    out: Annotated[
        Path | None, typer.Option(help="Result folder. Default: runs/agents-TIME")
    ] = None,
    model: Annotated[str, typer.Option(help="Which model, if it serves several.")] = "",
    vocab: Annotated[str, typer.Option(help="Token ids to draw from, LOW:HIGH.")] = "1000:30000",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one try.")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="More tries after one that failed.")] = 2,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before anything counts.")] = 4,
    sample: Annotated[float, typer.Option(min=0, help="Seconds between /metrics. 0: none.")] = 1.0,
    hints: Annotated[bool, typer.Option(help="Say program and last turn in vllm_xargs.")] = True,
    priority: Annotated[
        bool, typer.Option(help="Send the program's number as the request's priority.")
    ] = False,
    reset: Annotated[
        bool, typer.Option(help="Empty the prefix cache first (VLLM_SERVER_DEV_MODE=1).")
    ] = False,
    extra: Annotated[str, typer.Option(help="JSON to put into every request.")] = "",
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="If it wants one.")] = "",
) -> None:
    """Put multi-turn agents on a running server and measure what they see.

    Each program sends its context as token ids, reads the streamed answer, runs its tool (a real
    pause) and sends the longer context again. JCT counts from the moment a program should have
    begun, so a client or server that is late cannot hide it; retries and timeouts count too.

    Ctrl-C stops the programs and keeps what was measured.

    [bold]Examples[/]

      continuum bench agents http://localhost:8000 --arrivals poisson:3
      continuum bench agents http://localhost:8000 --workload mine.toml --arrivals closed:64
      continuum bench agents http://localhost:8000 --workload claude-code:requests.jsonl.gz
    """
    console = Console(highlight=False)
    with _told("agents"):
        chosen = find_workload(workload)
        added = _object(extra)
        seconds = duration or chosen.defaults.duration_s
        most = programs or chosen.defaults.programs
        load = Load(
            workload=chosen,
            arrivals=read_arrivals(arrivals or chosen.defaults.arrivals, seed, seconds, most),
            tokens=read_vocab(vocab, seed),
            model=_model(url, api_key, model),
            duration_s=seconds,
            programs=most,
            hints=hints,
            priority=priority,
            extra=added,
        )
        manner = Manner(Patience(timeout, retries), warm_up, sample, reset=reset, api_key=api_key)
        folder = out or Path("runs") / time.strftime("agents-%Y%m%d-%H%M%S")
        state = _measure_agents(console, url, load, manner, folder)
    if state == "interrupted":
        raise typer.Exit(130)


@app.command()
def ab(
    arms: Annotated[
        str,
        typer.Option(help="Comma-separated; the first is what the others are compared with."),
    ] = ",".join(DEFAULT),
    workload: WorkloadOption = "pressure",
    arrivals: ArrivalsOption = "",
    duration: Annotated[float, typer.Option(min=0, help="As for agents.")] = 0,
    programs: Annotated[int, typer.Option(min=0, help="As for agents.")] = 0,
    dram: Annotated[
        str, typer.Option(help="Live KV / DRAM, like 0.5,1,2,4; or a size, like 64GiB.")
    ] = "2",
    repeats: Annotated[int, typer.Option(min=1, help="Of everything, each with its own seed.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the first repeat.")] = 42,
    out: Annotated[
        Path | None, typer.Option(help="Result folder; one that is there is gone on with.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder. Empty: a tiny random Llama.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    vocab: Annotated[str, typer.Option(help="Token ids, LOW:HIGH. Empty: the model's.")] = "",
    blocks: Annotated[int, typer.Option(min=0, help="VRAM pool, in blocks. 0: all there is.")] = 17,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 128,
    batch_tokens: Annotated[int, typer.Option(help="vLLM's --max-num-batched-tokens.")] = 1024,
    seqs: Annotated[int, typer.Option(help="vLLM's --max-num-seqs.")] = 16,
    max_len: Annotated[int, typer.Option(help="vLLM's --max-model-len. 0: what fits.")] = 0,
    eager: Annotated[bool, typer.Option(help="Without CUDA graphs.")] = True,
    server_args: Annotated[str, typer.Option(help="More for every vllm serve.")] = "",
    shims: Annotated[
        Path | None,
        typer.Option(envvar="BENCH_SHIMS", help="CPU shims of rivals (arms.py)."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one try.")] = 600.0,
    sample: Annotated[float, typer.Option(min=0, help="As for agents.")] = 1.0,
) -> None:
    """Start a server for each way to serve, put the same agents on each, and compare.

    The same model, VRAM pool, DRAM and requests for all arms; arms in alternating order; ratios in
    pairs with their 95 % interval; every answer compared token for token; server logs kept. An
    arm that cannot run here is listed with its reason.

    Ctrl-C stops the server and keeps what was measured; the same command goes on from there.

    [bold]Examples[/]

      continuum bench ab --arms none,continuum,lmcache-mp --repeats 5 --out runs/ab
      continuum bench ab --dram 0.5,1,2,4 --out runs/sweep
    """
    from bench.serve.cli_ab import Options, run

    with _told("ab"):
        options = Options(
            arms=arms.split(","),
            workload=find_workload(workload),
            dram=dram,
            model=model,
            vocab=vocab,
            server=ServerOptions(
                num_blocks=blocks,
                block_size=block_size,
                max_model_len=max_len,
                max_num_seqs=seqs,
                max_num_batched_tokens=batch_tokens,
                dtype=dtype,
                eager=eager,
                args=tuple(shlex.split(server_args)),
            ),
            patience=Patience(timeout),
        )
        folder = out or Path("runs") / time.strftime("ab-%Y%m%d-%H%M%S")
        state = run(
            options.experiment(
                arrivals=arrivals,
                duration_s=duration,
                programs=programs,
                repeats=repeats,
                seed=seed,
                shims=shims,
                sample_s=sample,
            ),
            folder,
        )
    if state == "interrupted":
        raise typer.Exit(130)


@app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(help="A result folder: what the other is compared with.")
    ],
    second: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Compare two result folders, in pairs where they got the same requests.

    Ratios are second / first: below 1 the second is faster. In brackets the 95 % interval over
    repeats and programs. Arms that only one of them has are left out.
    """
    with _told("compare"):
        made = [comparison.columns(results.load(each)) for each in (first, second)]
        for base, other in comparison.matching(*made):
            title = base.title if base.title == other.title else f"{base.title}, {other.title}"
            console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
            console.print(comparison.table(title, [base, other]))


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """What goes wrong inside is told in one sentence, with status 1."""
    try:
        yield
    except ERRORS as error:
        Console(stderr=True).print(
            f"[red]continuum bench {name}:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(1) from None


def _measure_agents(
    console: Console, url: str, load: Load, manner: Manner, out: Path
) -> results.State:
    """Run the load, show the table, leave the folder."""
    if (out / results.RUNS).exists():
        raise ResultError(f"{out} holds results already; give another --out")
    run = Run(
        name="agents",
        workload=load.workload.name,
        settings=settings_of(load),
        seed=load.tokens.seed,
        url=url,
        model=load.model,
        versions=versions(),
        machine=machine(),
        planned_programs=load.most_programs() or 0,
    )
    folder = RunFolder(out / results.RUNS / run.name, run)
    with folder, Progress(console, load.workload.name, planned_turns(load)) as progress:
        state = measure(
            server_url(url), load, folder, manner, lambda turn: progress.turn(bool(turn.error))
        )
    loaded = results.load(out)
    console.print(summary.table_of(loaded[0]))
    summary.write_csv(out, loaded)
    for each in [turn for turn in loaded[0].turns if turn.error][:3]:
        console.print(
            f"{each.program} turn {each.turn + 1}: {each.error}", style="red", markup=False
        )
    console.print(f"Written: {escape(str(out))}", soft_wrap=True)
    return state


def settings_of(load: Load) -> dict[str, Any]:
    """What makes two loads the same."""
    return {
        "arrivals": load.arrivals.text,
        "duration_s": load.duration_s,
        "programs": load.programs,
        "vocab": f"{load.tokens.low}:{load.tokens.high}",
        "hints": load.hints,
        "priority": load.priority,
        "extra": load.extra,
    }


def planned_turns(load: Load) -> int:
    """Of all programs; 0 if only time ends them."""
    return sum(len(load.plan(number).turns) for number in range(load.most_programs() or 0))


def read_vocab(text: str, seed: int) -> Tokens:
    """Read LOW:HIGH."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise CommandError(f"--vocab {text}: write LOW:HIGH, like 1000:30000")
    return Tokens(seed, int(low), int(high))


def server_url(url: str) -> str:
    """The address without /v1, with its scheme."""
    return (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def _model(url: str, api_key: str, wanted: str) -> str:
    from continuum_connector.cli.calibrate import choose_model

    with contextlib.closing(Server(url, api_key)) as server:
        return choose_model(server.models(), wanted).name


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise CommandError(f"--extra: {error}") from None
    if not isinstance(value, dict):
        raise CommandError("--extra: write a JSON object, like '{\"top_k\": 1}'")
    return value


if __name__ == "__main__":
    app(prog_name="continuum bench")
