"""`continuum size`: how much DRAM does a server need, and how much disk below it?"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.table import Table

from continuum_connector.sizes import parse_bytes
from continuum_connector.tools.checks.line import size as text_of
from continuum_connector.tools.cli.kept import of_server, of_token
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import name, terminal
from continuum_connector.tools.sizing import (
    FILL,
    Load,
    Need,
    Overflow,
    Place,
    mean_gap,
    need,
    overflow,
)

GIB = 2**30
MOST = 2**60  # bytes

Command = Annotated[
    list[str] | None,
    typer.Argument(help="What starts the server, pasted after two dashes; or a file; or -."),
]
Model = Annotated[str, typer.Option(help="A folder with config.json, or a downloaded model.")]
PerToken = Annotated[
    str, typer.Option(help="KV bytes of a token over all layers, instead of --model.")
]
KvDtype = Annotated[str, typer.Option(help="As you serve: auto or fp8.")]
Context = Annotated[int, typer.Option(min=1, max=10**9, help="Mean tokens of a context.")]
Programs = Annotated[float, typer.Option(min=0.0, max=1e9, help="Agents alive at once.")]
Rate = Annotated[float, typer.Option(min=0.0, max=1e6, help="Or: agents that start, per second.")]
Turns = Annotated[
    float, typer.Option(min=1.0, max=1e9, help="Mean turns of an agent, with --rate.")
]
Gap = Annotated[float, typer.Option(min=0.01, max=1e9, help="Median seconds between turns.")]
GapP90 = Annotated[
    float, typer.Option(min=0.0, max=1e9, help="Their 90th percentile. 0: same as the median.")
]
TurnS = Annotated[float, typer.Option(min=0.01, max=1e9, help="Mean seconds that a turn takes.")]
NewTokens = Annotated[int, typer.Option(min=1, max=10**9, help="Mean tokens that a turn adds.")]
Vram = Annotated[str, typer.Option(help="KV space of one GPU; vLLM logs it at its start.")]
Gpus = Annotated[
    int, typer.Option(min=0, max=10**5, help="GPUs that share a model. 0: as the command says.")
]
Pcie = Annotated[float, typer.Option(min=0.1, max=1e6, help="GB/s of one GPU's link, one way.")]
Dram = Annotated[str, typer.Option(help="DRAM for the tier; the rest goes to a disk.")]
DriveRate = Annotated[
    float, typer.Option("--drive", min=0.01, max=1e6, help="GB/s at which the drive reads.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


def size(
    command: Command = None,
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
    gpus: Gpus = 0,
    pcie: Pcie = 50.0,
    dram: Dram = "",
    drive: DriveRate = 3.0,
    as_json: AsJson = False,
) -> None:
    """Say how much DRAM a server's agents need.

    Also, how busy the links to its GPUs would be; with --dram, how much disk they need if there is
    only that much DRAM.

    Defaults were measured on coding agents; give what you know about yours:

    \b
      continuum size --bytes-per-token 128KiB --programs 40
      continuum size --model MODEL --gpus 2 --rate 0.5 --turns 20 --gap 1
      continuum size --programs 40 -- vllm serve MODEL --tensor-parallel-size 2

    What you serve with says most: parallelism, the type of the KV cache, drafts.

    \b
    live programs = --programs, or rate x turns x (mean gap + turn)
    live KV       = live programs x context x bytes per token
    dram_bytes    = live KV / 0.8; 0 if 0.8 of VRAM's KV space holds it
    disk_bytes    = live KV / 0.8; 0 if 0.8 of --dram holds it

    The mean gap is that of a log-normal distribution with this median and P90.
    """
    if not programs and not rate:
        raise CommandError("how many agents? --programs alive at once, or --rate per second")
    mean_s = mean_gap(gap, gap_p90 or gap)
    load = Load(context, new_tokens, mean_s, turn, programs, rate, turns)
    has = _bytes("--dram", dram) if dram else 0
    token = _bytes("--bytes-per-token", bytes_per_token) if bytes_per_token else 0
    kept = of_token(token, gpus, bool(model or command))
    kept = kept or of_server(command or [], _options(model, kv_cache_dtype, gpus), bool(has))
    sizes = kept.context(load.context), kept.new(load.new_tokens)
    place = Place(*sizes, _bytes("--vram", vram), kept.num_gpus, pcie * 1e9)
    found = need(load, place)
    below = overflow(load, place, has, drive * 1e9) if has else None
    if as_json:
        print(json.dumps(as_object(load, place, found, below) | kept.as_object(), indent=1))
    elif below is None or not found.dram_bytes:
        _show([*kept.rows, *rows(load, place, found)], advice(place, found))
    else:
        lines = [*kept.rows, *rows(load, place, found), ("", "", "")]
        _show([*lines, *disk_rows(load, has, below, drive)], disk_advice(has, below, drive))


def _options(model: str, kv_cache_dtype: str, gpus: int) -> dict[str, str]:
    """Our own options as `vllm serve` has them; "" for each that is not given."""
    dtype = "" if kv_cache_dtype == "auto" else kv_cache_dtype
    ranks = str(gpus) if gpus else ""
    return {"--model": model, "--kv-cache-dtype": dtype, "--tensor-parallel-size": ranks}


def _show(lines: list[tuple[str, str, str]], said: str) -> None:
    console = terminal()
    console.print(_table(lines))
    console.print(f"\n{name(said)}", soft_wrap=True)


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
    """Rounded up to whole GiB, as one would write it in a config."""
    return math.ceil(num_bytes / GIB)


def rows(load: Load, place: Place, found: Need) -> list[tuple[str, str, str]]:
    """The rows of the table: what, how much, and how it was computed."""
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
    """The last line: what to set, or what stands in the way."""
    if not found.dram_bytes:
        return "Pins in VRAM are enough: CONTINUUM_DRAM_BYTES=0 saves the DRAM."
    setting = f"CONTINUUM_DRAM_BYTES={whole_gib(found.dram_bytes)}GiB"
    if found.is_too_fast:
        return (
            f"{setting} would hold it, but its loads take more than {FILL:.0%} of a link of "
            f"{place.pcie / 1e9:g} GB/s: use more GPUs, or fewer programs on each."
        )
    return f"Serve with {setting} (per node: once for all its GPUs)."


def disk_rows(
    load: Load, dram_bytes: int, below: Overflow, drive: float
) -> list[tuple[str, str, str]]:
    """The rows on the disk below `dram_bytes`, whose drive reads `drive` GB/s."""
    share = ("of it not in DRAM", f"{below.share:.0%}", f"beyond {FILL:g} x {text_of(dram_bytes)}")
    if not below.disk_bytes:
        return [share, ("disk_bytes", "0 GiB", f"{FILL:.0%} of the DRAM there is holds all")]
    return [
        share,
        ("disk_bytes", f"{whole_gib(below.disk_bytes)} GiB", f"live KV / {FILL:g}, rounded up"),
        ("disk reads", f"{below.reads / 1e9:.2f} GB/s", "turns not in DRAM x context"),
        ("one read", f"{below.read_s:.2f} s", f"a context at {drive:g} GB/s"),
        (
            "not computed",
            f"{below.tokens:,.0f}/s",
            "prompt tokens, if all is written",
        ),
        (
            "disk writes",
            f"{below.written / 1e12:.2f} TB/day",
            f"all of it: turns x {load.new_tokens:,} new",
        ),
    ]


def disk_advice(dram_bytes: int, below: Overflow, drive: float) -> str:
    """The last line, if there is to be a disk."""
    setting = f"CONTINUUM_DRAM_BYTES={whole_gib(dram_bytes)}GiB"
    if not below.disk_bytes:
        return f"Serve with {setting}: no disk is needed."
    setting += f" CONTINUUM_DISK_PATH=FOLDER CONTINUUM_DISK_BYTES={whole_gib(below.disk_bytes)}GiB"
    written = min(1.0, below.disk_bytes / below.written)
    budget = "the default disk_write_budget, disk_bytes a day, covers all new KV"
    if written < 1.0:
        budget = (
            f"the default disk_write_budget, disk_bytes a day, covers {written:.0%} of all new KV: "
            "that of programs that came back most"
        )
    if below.is_too_slow:
        return (
            f"{setting} would hold it, but reads take more than {FILL:.0%} of a drive of "
            f"{drive:g} GB/s: turns that find it busy compute instead; {budget}."
        )
    return f"Serve with {setting}; {budget}."


def as_object(load: Load, place: Place, found: Need, below: Overflow | None) -> dict[str, Any]:
    """What --json prints: bytes, seconds, bytes per second."""
    names = {"live_programs": load.live, "turns_per_s": load.turns_per_s}
    return (
        {**names, "mean_gap_s": load.gap_s, "context_bytes": place.context_bytes}
        | vars(found)
        | {"disk": None if below is None else vars(below)}
    )


def _table(lines: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", style="bold")
    table.add_column(overflow="fold", style="dim")
    for line in lines:
        table.add_row(*map(name, line))
    return table
