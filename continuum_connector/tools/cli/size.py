"""`continuum size`: how much DRAM does a server need?"""

from __future__ import annotations

import json
import math
import os
from typing import Annotated, Any

import typer
from rich.table import Table

from continuum_connector.config import parse_bytes
from continuum_connector.tools.checks.line import size as text_of
from continuum_connector.tools.checks.model import aside
from continuum_connector.tools.checks.model_file import NoModelError, read_model_config
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.shape import Shape, ShapeError, read_shape
from continuum_connector.tools.cli.reading import command
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import name, terminal
from continuum_connector.tools.sizing import FILL, Load, Need, Place, mean_gap, need
from continuum_connector.vllm.proven import why_no_tier

GIB = 2**30
MOST = 2**60  # bytes

Model = Annotated[str, typer.Option(help="A folder with config.json, or downloaded.")]
PerToken = Annotated[
    str, typer.Option(help="KV bytes of a token over all layers, instead of --model.")
]
KvDtype = Annotated[str, typer.Option(help="As served: auto or fp8.")]
Context = Annotated[int, typer.Option(min=1, max=10**9, help="Tokens of a context, mean.")]
Programs = Annotated[float, typer.Option(min=0.0, max=1e9, help="Agents alive at once.")]
Rate = Annotated[float, typer.Option(min=0.0, max=1e6, help="Or: agents that start, per second.")]
Turns = Annotated[
    float, typer.Option(min=1.0, max=1e9, help="Turns of an agent, mean, with --rate.")
]
Gap = Annotated[float, typer.Option(min=0.01, max=1e9, help="Seconds between turns, median.")]
GapP90 = Annotated[
    float, typer.Option(min=0.0, max=1e9, help="And 90th percentile. 0: as the median.")
]
TurnS = Annotated[float, typer.Option(min=0.01, max=1e9, help="Seconds that a turn takes, mean.")]
NewTokens = Annotated[int, typer.Option(min=1, max=10**9, help="Tokens a turn adds, mean.")]
Vram = Annotated[str, typer.Option(help="KV space of one GPU: vLLM logs it at start.")]
Gpus = Annotated[int, typer.Option(min=1, max=10**5, help="GPUs that share a model.")]
Pcie = Annotated[float, typer.Option(min=0.1, max=1e6, help="GB/s of one GPU's link, one way.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


def size(
    model: Model = "",
    bytes_per_token: PerToken = "",
    kv_cache_dtype: KvDtype = "auto",
    context: Context = 122_000,
    programs: Programs = 0.0,
    rate: Rate = 0.0,
    turns: Turns = 64.0,
    gap: Gap = 9.0,
    gap_p90: GapP90 = 72.0,
    turn: TurnS = 5.0,
    new_tokens: NewTokens = 3_276,
    vram: Vram = "55GiB",
    gpus: Gpus = 1,
    pcie: Pcie = 50.0,
    as_json: AsJson = False,
) -> None:
    """Say how much DRAM a server's agents need, and how busy the links to its GPUs would be.

    Defaults are what was measured of coding agents; give what you know of yours:

        continuum size --bytes-per-token 128KiB --programs 40

        continuum size --model MODEL --gpus 2 --rate 0.5 --turns 20 --gap 1 --gap-p90 4

    live programs = --programs, or rate x turns x (mean gap + turn)

    live KV = live programs x context x bytes per token

    dram_bytes = live KV / 0.8; 0 where 0.8 of VRAM's KV space holds it

    The mean gap is that of a log-normal distribution with this median and P90.
    """
    with command("size"):
        if not programs and not rate:
            raise CommandError("how many agents? --programs alive at once, or --rate per second")
        mean_s = mean_gap(gap, gap_p90 or gap)
        load = Load(context, new_tokens, mean_s, turn, programs, rate, turns)
        place = _place(model, bytes_per_token, kv_cache_dtype, load, vram, gpus, pcie)
        found = need(load, place)
    if as_json:
        print(json.dumps(as_object(load, place, found), indent=1))
        return
    console = terminal()
    console.print(_table(rows(load, place, found)))
    console.print(f"\n{name(advice(place, found))}", soft_wrap=True)


def _place(
    model: str, per_token: str, dtype: str, load: Load, vram: str, gpus: int, pcie: float
) -> Place:
    if bool(model) is bool(per_token):
        raise CommandError("give --model or --bytes-per-token, one of them")
    vram_bytes = _bytes("--vram", vram)
    if per_token:
        token = _bytes("--bytes-per-token", per_token)
        context, new = token * load.context, token * load.new_tokens
    else:
        shape = _shape(model, dtype)
        context = shape.context_bytes(load.context, gpus)
        new = len(shape.layers) * shape.token_bytes(gpus) * load.new_tokens
    return Place(context, new, vram_bytes, gpus, pcie * 1e9)


def _shape(model: str, dtype: str) -> Shape:
    try:
        shape = read_shape(read_model_config(model, os.environ), kv_cache_dtype=dtype)
    except (NoModelError, ShapeError) as why:
        raise CommandError(f"{why}; give --bytes-per-token instead of --model") from None
    if why_not := aside(Plan(), shape) or why_no_tier(1, 1, True, shape.kv_cache_dtype):
        raise CommandError(f"{why_not}; no DRAM would be used")
    return shape


def _bytes(option: str, text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise CommandError(f'{option}: {error}; write one such as "128KiB" or "55GiB"') from None
    if found > MOST:
        raise CommandError(f"{option} {text} is more than any machine has")
    if found == 0:
        raise CommandError(f"{option} is 0, which holds nothing")
    return found


def whole_gib(num_bytes: float) -> int:
    """Rounded up, as one would write it in a config."""
    return math.ceil(num_bytes / GIB)


def rows(load: Load, place: Place, found: Need) -> list[tuple[str, str, str]]:
    """What, how much, and how that was reckoned."""
    mean = f"mean gap {load.gap_s:.1f} s + turn {load.turn_s:g} s"
    lives = (
        "as given" if load.programs else f"{load.arrivals:g}/s x {load.turns:g} turns x ({mean})"
    )
    gpus = f" / {place.num_gpus} GPUs" if place.num_gpus > 1 else ""
    token = place.context_bytes / load.context
    lines = [
        ("KV of a context", text_of(place.context_bytes), f"{load.context:,} x {text_of(token)}"),
        ("live programs", f"{load.live:.0f}", lives),
        ("live KV", text_of(found.live_bytes), "programs x KV of a context"),
        ("of it in VRAM", f"{found.share_vram:.0%}", f"{found.num_in_vram} programs"),
        ("dram_bytes", f"{whole_gib(found.dram_bytes)} GiB", _why_dram(found)),
    ]
    if not found.dram_bytes:
        return lines
    per_gpu = f"{whole_gib(found.dram_bytes / place.num_gpus)} GiB"
    lines += [("per GPU", per_gpu, f"dram_bytes{gpus}")] if gpus else []
    return [
        *lines,
        ("turns", f"{load.turns_per_s:.2f}/s", f"programs / ({mean})"),
        ("loads per GPU", f"{found.loads / 1e9:.2f} GB/s", f"turns not in VRAM x context{gpus}"),
        (
            "stores per GPU",
            f"{found.stores / 1e9:.2f} GB/s",
            f"turns x {load.new_tokens:,} new{gpus}",
        ),
        ("one load", f"{found.load_s:.2f} s", f"a context{gpus} at {place.pcie / 1e9:g} GB/s"),
    ]


def _why_dram(found: Need) -> str:
    if found.dram_bytes:
        return f"live KV / {FILL:g}, rounded up"
    return f"{FILL:.0%} of VRAM's KV space holds all"


def advice(place: Place, found: Need) -> str:
    """The last line: what to set, or what is in the way."""
    if not found.dram_bytes:
        return "Pins in VRAM are enough: leave dram_bytes at 0."
    setting = f"CONTINUUM_DRAM_BYTES={whole_gib(found.dram_bytes)}GiB"
    if found.is_too_fast:
        return (
            f"{setting} would hold it, but its loads take more than {FILL:.0%} of a link of "
            f"{place.pcie / 1e9:g} GB/s: use more GPUs, or fewer programs on each."
        )
    return f"Serve with {setting} (per node: once for all its GPUs)."


def as_object(load: Load, place: Place, found: Need) -> dict[str, Any]:
    """What --json prints: bytes, seconds, bytes per second."""
    names = {"live_programs": load.live, "turns_per_s": load.turns_per_s}
    return {**names, "mean_gap_s": load.gap_s, "context_bytes": place.context_bytes} | vars(found)


def _table(lines: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", style="bold")
    table.add_column(overflow="fold", style="dim")
    for line in lines:
        table.add_row(*map(name, line))
    return table
