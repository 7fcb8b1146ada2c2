"""`continuum calibrate`: measures a server's prefill cost, as a file for its connector's start."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from continuum_connector import files
from continuum_connector.costs import state_file
from continuum_connector.tools.cli import measure
from continuum_connector.tools.cli.measure import Point, Prober
from continuum_connector.tools.cli.server import CommandError, Model, Server
from continuum_connector.tools.cli.terminal import command, name, terminal

LOCAL = ("localhost", "127.0.0.1", "::1")


def calibrate(
    url: Annotated[str, typer.Argument(help="The server's address, like http://localhost:8000.")],
    model: Annotated[str, typer.Option(help="Which model, if the server has several.")] = "",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, like 1000,4000,max. Empty: doubling.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="A folder, for a file named after model and GPU; or a file.")
    ] = Path(),
    repeats: Annotated[int, typer.Option(min=1, max=100, help="How often to send each.")] = 3,
    chunk: Annotated[
        int,
        typer.Option(
            min=0, max=10**9, help="The server's --max-num-batched-tokens, if you know it."
        ),
    ] = 0,
    gpu: Annotated[
        str, typer.Option(help="The GPU's name for the file. Empty: ask nvidia-smi.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="If it wants one.")] = "",
) -> None:
    """Measure what prefilling costs on a running server.

    Sends random prompts of growing length, first unknown to any cache and then behind a
    cached prefix, reads how long each prefill took, and fits seconds per step, per token and
    per attended pair. The connector learns the same while it serves. With the file
    it knows from the first turn: start the server with state_path set to it.

    Run it while nobody else uses the server. Ctrl-C keeps what was measured so far.
    """
    with command("calibrate"), contextlib.closing(Server(url, api_key)) as server:
        _run(terminal(), server, model, lengths, out, repeats, chunk, gpu)


def _run(
    console: Console,
    server: Server,
    model: str,
    lengths: str,
    out: Path,
    repeats: int,
    chunk: int,
    gpu: str,
) -> None:
    chosen = choose_model(server.models(), model)
    points = measure.plan(read_lengths(lengths, chosen.max_model_len))
    if out.suffix and not out.parent.is_dir():
        raise CommandError(f"there is no folder {out.parent}; make it, or give another --out")
    gpu = gpu or find_gpu(server.host)
    path = out if out.suffix else Path(state_file.file_in(str(out), f"{chosen.root} {gpu}"))
    _kept(path)  # so that it fails before minutes of measuring
    prober = Prober(server, chosen.name, repeats)
    if prober.num_others:
        others = f"{prober.num_others} requests of others are running"
        console.print(f"[yellow]{others}: the figures will be too high.")
    done, is_whole = _measure(console, prober, points, repeats)
    coefficients = measure.fit(done, chunk)
    console.print(_table(chosen.name, done, coefficients, chunk))
    load = measure.load_coefficients(server.metrics()) if prober.has_connector else None
    console.print(_said(prober, coefficients, load))
    _write(path, chosen.root, gpu, done, coefficients, load)
    console.print(f"Written: {name(str(path))}", soft_wrap=True)
    if not is_whole:
        raise typer.Exit(130)


def choose_model(served: list[Model], wanted: str) -> Model:
    """Return the model that was asked for, or the only one."""
    names = ", ".join(model.name for model in served)
    found = [model for model in served if wanted in ("", model.name)]
    if wanted and not found:
        raise CommandError(f"no model {wanted!r} is served here; there is: {names}")
    if len(found) != 1:
        raise CommandError(f"{len(served)} models are served; choose by --model: {names}")
    return found[0]


def read_lengths(text: str, max_model_len: int) -> list[int]:
    """Return the lengths asked for; `max` is the longest prompt the model takes."""
    if not text:
        return measure.default_lengths(max_model_len)
    longest = (max_model_len or 32768) - 2
    found = []
    for each in text.split(","):
        word = each.strip()
        if word != "max" and not (word.isdecimal() and len(word) < 10):
            raise CommandError(f"--lengths: {word!r} is no number of tokens; write 1000,4000,max")
        found.append(longest if word == "max" else int(word))
    if min(found) < measure.SHORTEST or max(found) > longest:
        raise CommandError(
            f"--lengths: this model takes prompts of {measure.SHORTEST} to {longest} tokens, "
            f"not {min(found) if min(found) < measure.SHORTEST else max(found)}"
        )
    return found


def find_gpu(host: str) -> str:
    """The GPU's name, if the server is on this machine and has one; else "unknown"."""
    smi = shutil.which("nvidia-smi")
    if host not in LOCAL or smi is None:
        return "unknown"
    line = [smi, "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(line, capture_output=True, text=True, timeout=10, check=True).stdout
        return told.partition("\n")[0].strip() or "unknown"
    return "unknown"


def _measure(
    console: Console, prober: Prober, points: list[Point], repeats: int
) -> tuple[list[Point], bool]:
    """Return the points that are complete, and whether they are all."""
    done: list[Point] = []
    try:
        prober.warm_up(points[0].num_new)
        for point, on_sent in _shown(console, points, repeats):
            if prober.measure(point, on_sent):
                done.append(point)
            else:
                console.print(
                    f"[yellow]A prefix of {point.num_cached:,} tokens was not found in VRAM again: "
                    "left out. Is prefix caching on, and is nobody else using the server?"
                )
    except KeyboardInterrupt:
        console.print(f"[yellow]Stopped: {len(done)} of {len(points)} measured.")
        return done, False
    return done, True


def _shown(
    console: Console, points: list[Point], repeats: int
) -> Iterator[tuple[Point, Callable[[], None]]]:
    """Yield each point with a call that advances the bar. The bar counts computed tokens, because
    they are what takes time."""
    total = sum(point.num_cached + repeats * point.num_new for point in points)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        for point in points:
            behind = f" behind {point.num_cached:,}" if point.num_cached else ""
            bar.update(task, description=f"{point.num_new:,} tokens{behind}")
            yield point, partial(bar.advance, task, point.num_new)
            bar.advance(task, point.num_cached)


def _table(model: str, points: list[Point], coefficients: list[float], chunk: int) -> Table:
    table = Table(title=f"{name(model)}: medians")
    for column in ("new tokens", "cached", "TTFT", "of it prefill", "fitted", "error"):
        table.add_column(column, justify="right")
    for cells in measure.rows(points, coefficients, chunk):
        table.add_row(*cells)
    return table


def _said(prober: Prober, coefficients: list[float], load: list[float] | None) -> str:
    base, per_token, per_pair = coefficients[:3]
    text = (
        f"A step {base * 1e3:.3g} ms, a token {per_token * 1e6:.3g} us, "
        f"a token behind 100,000 others {per_pair * 1e11:.3g} us more."
    )
    if load is not None:
        return f"{text} A block from DRAM {load[1] * 1e6:.3g} us."
    if prober.has_connector:
        return f"{text} Nothing was loaded from DRAM yet: learned with the first loads."
    return f"{text} ContinuumConnector does not run there: no figures of DRAM."


def _kept(path: Path) -> dict[str, Any]:
    """What the file at `path` already holds besides, such as a server's tool times. CommandError if
    it is not a state file, because writing would destroy it."""
    try:
        if not path.exists():
            return {}
        if kind := files.no_file(str(path)):
            raise CommandError(f"{path} is {kind}; give another --out")
        with path.open("rb") as file:
            found = json.loads(file.read(state_file.MAX_BYTES))
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        found = None
    state = found.get("state") if isinstance(found, dict) else None
    if not isinstance(state, dict) or found.get("version") != state_file.VERSION:
        raise CommandError(f"{path} is no state file and would be lost; give another --out")
    return state


def _write(
    path: Path,
    model: str,
    gpu: str,
    points: list[Point],
    coefficients: list[float],
    load: list[float] | None,
) -> None:
    """Write the state file, with the measurements that it was made from."""
    content = {
        "version": state_file.VERSION,
        "state": {**_kept(path), "costs": measure.costs_state(coefficients, load)},
        "model": model,
        "gpu": gpu,
        "measured": [vars(point) for point in points],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.put(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise CommandError(
            f"{path} cannot be written ({error.strerror}); give another --out"
        ) from None
