"""`continuum size`: how much DRAM does a server need, and how much disk below it?

DRAM must hold all of the live KV, because a pinned turn is also in DRAM by the time its pin ends.
So must the disk: the program that is away longest leaves DRAM, and sooner or later that is every
program. 0.8 is where hits collapse in measurements of full tiers: 0.75 to 0.87 of what they hold.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from continuum_connector.errors import ToldError
from continuum_connector.memory import parse_bytes
from continuum_connector.memory import size as text_of
from continuum_connector.tools.checks import Line, several
from continuum_connector.tools.checks import model as models
from continuum_connector.tools.checks.machine import VllmSeen, this_machine
from continuum_connector.tools.checks.plan import as_vllm_reads, planned
from continuum_connector.tools.cli.terminal import Command, looking, name, terminal

GIB = 2**30
MOST = 2**60  # bytes
DAY_S = 86_400
FILL = 0.8  # of a tier; if it is fuller, KV leaves that is needed again
_P90 = 1.2815515655446004  # of the standard normal distribution


def _of(text: str, least: float | None = None, most: float | None = None) -> Any:
    """An option of a text, or of a number within these bounds."""
    return typer.Option(min=least, max=most, help=text)


def size(
    command: Command = None,
    model: Annotated[str, _of("A folder with config.json, or a downloaded model.")] = "",
    bytes_per_token: Annotated[
        str, _of("KV bytes of a token over all layers, instead of --model.")
    ] = "",
    context: Annotated[int, _of("Mean tokens of a context.", 1, 10**9)] = 122_000,
    programs: Annotated[float, _of("Agents alive at once.", 0.0, 1e9)] = 0.0,
    rate: Annotated[float, _of("Or: agents that start, per second.", 0.0, 1e6)] = 0.0,
    turns: Annotated[float, _of("Mean turns of an agent, with --rate.", 1.0, 1e9)] = 64.0,
    gap: Annotated[float, _of("Median seconds between turns.", 0.01, 1e9)] = 9.0,
    gap_p90: Annotated[
        float, _of("Their 90th percentile. 0: same as the median.", 0.0, 1e9)
    ] = 72.0,
    turn: Annotated[float, _of("Mean seconds that a turn takes.", 0.01, 1e9)] = 5.0,
    new_tokens: Annotated[int, _of("Mean tokens that a turn adds.", 1, 10**9)] = 3_276,
    vram: Annotated[str, _of("KV space of one GPU; vLLM logs it at its start.")] = "55GiB",
    gpus: Annotated[int, _of("GPUs that share a model, with --bytes-per-token.", 1, 10**5)] = 1,
    pcie: Annotated[float, _of("GB/s of one GPU's link, one way.", 0.1, 1e6)] = 50.0,
    dram: Annotated[str, _of("DRAM for the tier; the rest goes to a disk.")] = "",
    drive: Annotated[float, _of("GB/s at which the drive reads.", 0.01, 1e6)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
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
        raise ToldError("how many agents? --programs alive at once, or --rate per second")
    load = Load(context, new_tokens, mean_gap(gap, gap_p90 or gap), turn, programs, rate, turns)
    has, token = _bytes("--dram", dram), _bytes("--bytes-per-token", bytes_per_token)
    if bool(model or command) is bool(token):
        raise ToldError("give --model, a command or --bytes-per-token, one of them")
    if gpus > 1 and not token:
        raise ToldError("--gpus goes with --bytes-per-token; a command has its own number")
    place = Place(token * context, token * new_tokens, _bytes("--vram", vram), gpus, pcie * 1e9)
    if not token:
        place = of_server(command or [], model, load, place, bool(has))
    found = Need(load, place)
    below = Overflow(load, place, has, drive * 1e9) if has else None
    if as_json:
        told = {"live_programs": load.live, "turns_per_s": load.turns_per_s}
        told |= {"mean_gap_s": load.gap_s, "context_bytes": place.context_bytes}
        kept_as = {"rests_on": place.rests_on, "num_gpus": place.num_gpus}
        disk = {"disk": below and vars(below)}
        print(json.dumps(told | vars(found) | disk | kept_as, indent=1))
        return
    lines, said = rows(load, place, found)
    if place.rests_on:
        lines.insert(0, ("KV as of", several("GPU", place.num_gpus), place.rests_on))
    if below is not None and found.dram_bytes:
        more, said = disk_rows(load, has, below, drive)
        lines += [("", "", ""), *more]
    amounts = Column(no_wrap=True, justify="right", style="bold")
    reasons = Column(overflow="fold", style="dim")
    table = Table.grid(Column(no_wrap=True), amounts, reasons, padding=(0, 2))
    for line in lines:
        table.add_row(*map(name, line))
    console = terminal()
    console.print(table)
    console.print(f"\n{name(said)}", soft_wrap=True)


def _bytes(option: str, text: str) -> int:
    """0 if the option is not given."""
    if not text:
        return 0
    with contextlib.suppress(ValueError):
        if 0 < (found := parse_bytes(text)) <= MOST:
            return found
    raise ToldError(f'{option}: {text!r} is not a size here; write one such as "128KiB" or "55GiB"')


# --- what a context takes --------------------------------------------------------------------
@dataclass(frozen=True)
class Load:
    """What agents do, in seconds and tokens. `programs`: how many are alive at once; 0 derives it
    from `arrivals`, programs per second."""

    context: int
    new_tokens: int
    gap_s: float  # mean time between two turns
    turn_s: float  # mean time of a turn, from its arrival to its last token
    programs: float = 0.0
    arrivals: float = 0.0
    turns: float = 0.0

    @property
    def live(self) -> float:
        """Programs that are alive at once."""
        return self.programs or self.arrivals * self.turns * (self.gap_s + self.turn_s)

    @property
    def turns_per_s(self) -> float:
        """Turns that all programs together begin per second."""
        return self.live / (self.gap_s + self.turn_s)


@dataclass(frozen=True)
class Place:
    """Where it runs. `context_bytes`: KV of one context over all GPUs. `new_bytes`: KV of the
    tokens that a turn adds. `vram_bytes`: KV space of one of `num_gpus`. `pcie`: bytes per second
    of its link. `rests_on`: who says what a context takes, "" if the user does."""

    context_bytes: float
    new_bytes: float
    vram_bytes: float
    num_gpus: int
    pcie: float
    rests_on: str = ""


def of_server(command: list[str], model: str, load: Load, place: Place, has_disk: bool) -> Place:
    """The place, with what vLLM says of this server's KV; without a vLLM here, with what
    config.json proves."""
    plan, environ = planned(command, model)
    if plan.why_no_server:
        raise ToldError(f"{plan.why_no_server}; paste all of `vllm serve MODEL ...`")
    machine = this_machine(environ)
    with looking():
        seen = machine.see("vllm", VllmSeen, *plan.words)
    plan = as_vllm_reads(plan, seen.options, environ)
    if plan.unknown:
        shown = ", ".join(plan.unknown)[:200]
        text = f"not seen: {shown}; a default was taken, or none was given"
        terminal(stderr=True).print(name(text), soft_wrap=True)
    if seen.refused:
        raise ToldError(f"vLLM refuses this: {seen.refused[:300]}; mend it")
    kv = models.kv_of(machine, plan, seen)
    if isinstance(kv, Line):
        raise ToldError(f"model: {kv.text}; give --model, or --bytes-per-token instead")
    says = "config.json alone, without vLLM"
    if kv.device:
        says = f"vLLM {seen.version}, its own layers on {kv.device}: {models.in_words(kv)}"
    if why_not := kv.aside or kv.no_tier:
        raise ToldError(f"{why_not}; no DRAM would be used")
    if has_disk and kv.no_disk:
        raise ToldError(f"{kv.no_disk}; leave --dram out")
    sizes = models.context_bytes(kv, load.context), models.new_bytes(kv, load.new_tokens)
    return Place(*sizes, place.vram_bytes, kv.num_ranks, place.pcie, says)


# --- the arithmetic ---------------------------------------------------------------------------
def mean_gap(median_s: float, p90_s: float) -> float:
    """The mean of a log-normal gap with this median and 90th percentile.

    Real gaps have a heavier tail, because people go away. The KV of those may leave.
    """
    sigma = math.log(max(p90_s / median_s, 1.0)) / _P90
    return median_s * math.exp(sigma * sigma / 2)


class Need:
    """The DRAM that a load needs, in bytes, and the rates with so much of it, in bytes per second
    on each GPU's link. `share_vram`: of the live KV."""

    def __init__(self, load: Load, place: Place) -> None:
        live, vram = load.live * place.context_bytes, place.vram_bytes * place.num_gpus
        self.live_bytes = live
        self.num_in_vram = int(vram // place.context_bytes)
        self.share_vram = min(1.0, vram / live) if live else 1.0
        self.dram_bytes = 0.0 if live <= FILL * vram else live / FILL
        turns_per_s = load.turns_per_s / place.num_gpus if self.dram_bytes else 0.0
        self.loads = turns_per_s * (1.0 - self.share_vram) * place.context_bytes
        self.stores = turns_per_s * place.new_bytes
        self.load_s = place.context_bytes / place.num_gpus / place.pcie
        self.is_too_fast = self.loads > FILL * place.pcie


class Overflow:
    """What is left to a drive of so many bytes per second if there is only so much DRAM.

    `share`: the share of turns whose KV is not in DRAM. `reads`: bytes per second. `written`: at
    most so many bytes per day, as each is written once.
    """

    def __init__(self, load: Load, place: Place, dram_bytes: float, drive: float) -> None:
        live = load.live * place.context_bytes
        held = FILL * max(dram_bytes, place.vram_bytes * place.num_gpus)
        self.share = max(0.0, 1.0 - held / live) if live else 0.0
        self.disk_bytes = live / FILL if self.share else 0.0
        self.reads = load.turns_per_s * self.share * place.context_bytes
        self.read_s = place.context_bytes / drive
        self.written = load.turns_per_s * place.new_bytes * DAY_S if self.share else 0.0
        self.is_too_slow = self.reads > FILL * drive


# --- its table --------------------------------------------------------------------------------
Rows = list[tuple[str, str, str]]  # what, how much, and how it was computed


def rows(load: Load, place: Place, found: Need) -> tuple[Rows, str]:
    """The rows on DRAM, and the last line: what to set, or what stands in the way."""
    mean = f"mean gap {load.gap_s:.1f} s + turn {load.turn_s:g} s"
    lives = f"{load.arrivals:g}/s x {load.turns:g} turns x ({mean})"
    gpus = f" / {place.num_gpus} GPUs" if place.num_gpus > 1 else ""
    token = text_of(place.context_bytes / load.context)
    lines = [
        ("KV of a context", text_of(place.context_bytes), f"{load.context:,} x {token}"),
        ("live programs", f"{load.live:.0f}", "as given" if load.programs else lives),
        ("live KV", text_of(found.live_bytes), "programs x KV of a context"),
        ("of it in VRAM", f"{found.share_vram:.0%}", f"{found.num_in_vram} programs"),
    ]
    if not found.dram_bytes:
        none = ("dram_bytes", "0 GiB", f"{FILL:.0%} of VRAM's KV space holds all")
        return [*lines, none], "Pins in VRAM are enough: CONTINUUM_DRAM_BYTES=0 saves the DRAM."
    loads, stores = (f"{rate / 1e9:.2f} GB/s" for rate in (found.loads, found.stores))
    link = f"{place.pcie / 1e9:g} GB/s"
    lines += [
        ("dram_bytes", _gib(found.dram_bytes), f"live KV / {FILL:g}, rounded up"),
        ("turns", f"{load.turns_per_s:.2f}/s", f"programs / ({mean})"),
        ("loads per GPU", loads, f"turns not in VRAM x context{gpus}"),
        ("stores per GPU", stores, f"turns x {load.new_tokens:,} new{gpus}"),
        ("one load", f"{found.load_s:.2f} s", f"a context{gpus} at {link}"),
    ]
    setting = _setting("DRAM", found.dram_bytes)
    if not found.is_too_fast:
        return lines, f"Serve with {setting} (per node: once for all its GPUs)."
    but = f"its loads take more than {FILL:.0%} of a link of {link}"
    return lines, f"{setting} would hold it, but {but}: use more GPUs, or fewer programs on each."


def disk_rows(load: Load, dram_bytes: int, below: Overflow, drive: float) -> tuple[Rows, str]:
    """The same of the disk below `dram_bytes`, whose drive reads `drive` GB/s."""
    setting = _setting("DRAM", dram_bytes)
    share = ("of it not in DRAM", f"{below.share:.0%}", f"beyond {FILL:g} x {text_of(dram_bytes)}")
    if not below.disk_bytes:
        none = ("disk_bytes", "0 GiB", f"{FILL:.0%} of the DRAM there is holds all")
        return [share, none], f"Serve with {setting}: no disk is needed."
    written = f"{below.written / 1e12:.2f} TB/day"
    lines = [
        share,
        ("disk_bytes", _gib(below.disk_bytes), f"live KV / {FILL:g}, rounded up"),
        ("disk reads", f"{below.reads / 1e9:.2f} GB/s", "turns not in DRAM x context"),
        ("one read", f"{below.read_s:.2f} s", f"a context at {drive:g} GB/s"),
        ("disk writes", written, f"all of it: turns x {load.new_tokens:,} new"),
    ]
    setting += f" CONTINUUM_DISK_PATH=FOLDER {_setting('DISK', below.disk_bytes)}"
    covered = min(1.0, below.disk_bytes / below.written)
    budget = f"the default disk_write_budget, disk_bytes a day, covers {covered:.0%} of all new KV"
    if not below.is_too_slow:
        return lines, f"Serve with {setting}; {budget}."
    but = f"reads take more than {FILL:.0%} of a drive of {drive:g} GB/s"
    busy = "turns that find it busy compute instead"
    return lines, f"{setting} would hold it, but {but}: {busy}; {budget}."


def _gib(num_bytes: float) -> str:
    """Rounded up to whole GiB, as one would write it in a config."""
    return f"{math.ceil(num_bytes / GIB)} GiB"


def _setting(tier: str, num_bytes: float) -> str:
    return f"CONTINUUM_{tier}_BYTES={_gib(num_bytes).replace(' ', '')}"
