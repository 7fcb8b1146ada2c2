"""`continuum size`: how much DRAM does a server need, and how much disk below it?"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from continuum_connector.sizes import parse_bytes
from continuum_connector.tools.checks import kv as kvs
from continuum_connector.tools.checks.ask import KV
from continuum_connector.tools.checks.line import size as text_of
from continuum_connector.tools.checks.machine import see_vllm, this_machine
from continuum_connector.tools.checks.model_file import NoModelError, read_model_config
from continuum_connector.tools.checks.plan import Plan, UsageError, as_vllm_reads
from continuum_connector.tools.checks.shape import ShapeError, read_shape
from continuum_connector.tools.cli.pasted import looking, planned
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
    int, typer.Option(min=1, max=10**5, help="GPUs that share a model, with --bytes-per-token.")
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
      continuum size --model MODEL --rate 0.5 --turns 20 --gap 1
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
    has, token = _bytes("--dram", dram), _bytes("--bytes-per-token", bytes_per_token)
    if bool(model or command) is bool(token):
        raise CommandError("give --model, a command or --bytes-per-token, one of them")
    if gpus > 1 and not token:
        raise CommandError("--gpus goes with --bytes-per-token; a command has its own number")
    kept = Kept(token.__mul__, token.__mul__, gpus, "")
    if not token:
        kept = of_server(command or [], model, bool(has))
    sizes = kept.context(load.context), kept.new(load.new_tokens)
    place = Place(*sizes, _bytes("--vram", vram), kept.num_gpus, pcie * 1e9)
    found = need(load, place)
    below = overflow(load, place, has, drive * 1e9) if has else None
    if as_json:
        told = {"live_programs": load.live, "turns_per_s": load.turns_per_s}
        told |= {"mean_gap_s": load.gap_s, "context_bytes": place.context_bytes, **vars(found)}
        disk = None if below is None else vars(below)
        kept_as = {"rests_on": kept.rests_on, "num_gpus": kept.num_gpus}
        print(json.dumps({**told, "disk": disk, **kept_as}, indent=1))
        return
    lines, said = rows(load, place, found), advice(place, found)
    if kept.rests_on:
        several = "s" if kept.num_gpus > 1 else ""
        lines.insert(0, ("KV as of", f"{kept.num_gpus} GPU{several}", kept.rests_on))
    if below is not None and found.dram_bytes:
        lines += [("", "", ""), *disk_rows(load, has, below, drive)]
        said = disk_advice(has, below, drive)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", style="bold")
    table.add_column(overflow="fold", style="dim")
    for line in lines:
        table.add_row(*map(name, line))
    console = terminal()
    console.print(table)
    console.print(f"\n{name(said)}", soft_wrap=True)


def _bytes(option: str, text: str) -> int:
    """0 if the option is not given."""
    if not text:
        return 0
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise CommandError(f'{option}: {error}; write one such as "128KiB" or "55GiB"') from None
    if found > MOST:
        raise CommandError(f"{option} {text} is more than any machine has")
    if found == 0:
        raise CommandError(f"{option} is 0, which holds nothing")
    return found


class Kept(NamedTuple):
    """Bytes that so many tokens of a context take, and that so many new ones do, over `num_gpus`.
    `rests_on`: who says so, "" if the user does."""

    context: Callable[[int], float]
    new: Callable[[int], float]
    num_gpus: int
    rests_on: str


def of_server(command: list[str], model: str, has_disk: bool) -> Kept:
    """What vLLM says of this server's KV; without a vLLM here, what config.json proves."""
    try:
        plan, environ = planned(command, model)
    except UsageError as error:
        raise CommandError(str(error)) from None
    if plan.why_no_server:
        raise CommandError(f"{plan.why_no_server}; paste all of `vllm serve MODEL ...`")
    machine = this_machine(environ)
    with looking():
        seen = see_vllm(machine, (KV, *plan.words))
    plan = as_vllm_reads(plan, seen.options, environ)
    if plan.unknown:
        shown = ", ".join(plan.unknown)[:200]
        text = f"not seen: {shown}; a default was taken, or none was given"
        terminal(stderr=True).print(name(text), soft_wrap=True)
    if plan.hides_its_model:
        raise CommandError("the model is among what is not seen; give --model")
    if (kv := seen.kv) is not None:
        if why_not := kv.aside or kv.no_tier:
            raise CommandError(f"{why_not}; no DRAM would be used")
        if has_disk and kv.no_disk:
            raise CommandError(f"{kv.no_disk}; leave --dram out")
        context, new = (functools.partial(of, kv) for of in (kvs.context_bytes, kvs.new_bytes))
        says = f"vLLM {seen.version}, its own layers on {kv.device}: {kvs.in_words(kv)}"
        return Kept(context, new, kv.num_ranks, says)
    if seen.refused:
        raise CommandError(f"vLLM refuses this: {seen.refused[:300]}; mend it")
    if seen.version and seen.not_seen:
        raise CommandError(
            f"not seen: vLLM {seen.version} cannot say here what is kept ({seen.not_seen[:300]}); "
            "give --bytes-per-token instead"
        )
    return _of_file(plan, environ, seen.trouble)


def _of_file(plan: Plan, environ: Mapping[str, str], trouble: str) -> Kept:
    """What config.json alone proves."""
    try:
        config = read_model_config(plan.model, environ)
        shape = read_shape(config, kv_cache_dtype=plan.kv_cache_dtype)
    except (NoModelError, ShapeError) as why:
        raise CommandError(f"{why}; give --bytes-per-token instead") from None
    ranks = plan.tensor_parallel
    context = functools.partial(shape.context_bytes, num_ranks=ranks)
    why_not = f" ({trouble[:80]})" if trouble else ""
    says = f"config.json alone, without vLLM{why_not}"
    return Kept(context, context, ranks * plan.pipeline_parallel, says)


Rows = list[tuple[str, str, str]]  # what, how much, and how it was computed


def _gib(num_bytes: float) -> str:
    """Rounded up to whole GiB, as one would write it in a config."""
    return f"{math.ceil(num_bytes / GIB)} GiB"


def rows(load: Load, place: Place, found: Need) -> Rows:
    mean = f"mean gap {load.gap_s:.1f} s + turn {load.turn_s:g} s"
    lives = f"{load.arrivals:g}/s x {load.turns:g} turns x ({mean})"
    gpus = f" / {place.num_gpus} GPUs" if place.num_gpus > 1 else ""
    token = text_of(place.context_bytes / load.context)
    why_none = f"{FILL:.0%} of VRAM's KV space holds all"
    why = f"live KV / {FILL:g}, rounded up" if found.dram_bytes else why_none
    lines = [
        ("KV of a context", text_of(place.context_bytes), f"{load.context:,} x {token}"),
        ("live programs", f"{load.live:.0f}", "as given" if load.programs else lives),
        ("live KV", text_of(found.live_bytes), "programs x KV of a context"),
        ("of it in VRAM", f"{found.share_vram:.0%}", f"{found.num_in_vram} programs"),
        ("dram_bytes", _gib(found.dram_bytes), why),
    ]
    if not found.dram_bytes:
        return lines
    if gpus:
        lines.append(("per GPU", _gib(found.dram_bytes / place.num_gpus), f"dram_bytes{gpus}"))
    loads, stores = (f"{rate / 1e9:.2f} GB/s" for rate in (found.loads, found.stores))
    return [
        *lines,
        ("turns", f"{load.turns_per_s:.2f}/s", f"programs / ({mean})"),
        ("loads per GPU", loads, f"turns not in VRAM x context{gpus}"),
        ("stores per GPU", stores, f"turns x {load.new_tokens:,} new{gpus}"),
        ("one load", f"{found.load_s:.2f} s", f"a context{gpus} at {place.pcie / 1e9:g} GB/s"),
    ]


def advice(place: Place, found: Need) -> str:
    """The last line: what to set, or what stands in the way."""
    if not found.dram_bytes:
        return "Pins in VRAM are enough: CONTINUUM_DRAM_BYTES=0 saves the DRAM."
    setting = _setting("DRAM", found.dram_bytes)
    if found.is_too_fast:
        return (
            f"{setting} would hold it, but its loads take more than {FILL:.0%} of a link of "
            f"{place.pcie / 1e9:g} GB/s: use more GPUs, or fewer programs on each."
        )
    return f"Serve with {setting} (per node: once for all its GPUs)."


def _setting(tier: str, num_bytes: float) -> str:
    return f"CONTINUUM_{tier}_BYTES={_gib(num_bytes).replace(' ', '')}"


def disk_rows(load: Load, dram_bytes: int, below: Overflow, drive: float) -> Rows:
    """The rows on the disk below `dram_bytes`, whose drive reads `drive` GB/s."""
    share = ("of it not in DRAM", f"{below.share:.0%}", f"beyond {FILL:g} x {text_of(dram_bytes)}")
    if not below.disk_bytes:
        return [share, ("disk_bytes", "0 GiB", f"{FILL:.0%} of the DRAM there is holds all")]
    written = f"{below.written / 1e12:.2f} TB/day"
    return [
        share,
        ("disk_bytes", _gib(below.disk_bytes), f"live KV / {FILL:g}, rounded up"),
        ("disk reads", f"{below.reads / 1e9:.2f} GB/s", "turns not in DRAM x context"),
        ("one read", f"{below.read_s:.2f} s", f"a context at {drive:g} GB/s"),
        ("not computed", f"{below.tokens:,.0f}/s", "prompt tokens, if all is written"),
        ("disk writes", written, f"all of it: turns x {load.new_tokens:,} new"),
    ]


def disk_advice(dram_bytes: int, below: Overflow, drive: float) -> str:
    """The last line, if there is to be a disk."""
    setting = _setting("DRAM", dram_bytes)
    if not below.disk_bytes:
        return f"Serve with {setting}: no disk is needed."
    setting += f" CONTINUUM_DISK_PATH=FOLDER {_setting('DISK', below.disk_bytes)}"
    budget = "the default disk_write_budget, disk_bytes a day, covers all new KV"
    if (written := below.disk_bytes / below.written) < 1.0:
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
