"""`continuum top`: a running server, live: what VRAM and DRAM hold, and what that brings.

The screen has 80 columns by 24 rows or more. What it says is made of two scrapes: `now`, and
`added`, what was added since the one before.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from continuum_connector.errors import ToldError, shown
from continuum_connector.memory import size
from continuum_connector.tools.analysis.words import ratio, seconds
from continuum_connector.tools.cli.server import Scrape, Server
from continuum_connector.tools.cli.terminal import name, terminal

WINDOW_S = 10.0  # the rates are means over this, or over one interval if that is longer


def top(
    url: Annotated[str, typer.Argument(help="The server's address, like http://localhost:8000.")],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="One look, which takes one interval.")
    ] = False,
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="If it wants one.")] = "",
) -> None:
    """Watch a running server.

    \b
    VRAM       how much of the KV cache requests, copies to DRAM and pins use
    gate       first turns held now, why earlier ones were let in (gate_wait_s)
    disk       how full it is, what is left of a day's budget (disk_path)
    prompts    where the tokens of recently admitted prompts were found
    pins       how many there are, and what ended earlier ones
    lost by    decisions that cost something: `pin never` kept VRAM for nobody,
               `free recomputed` dropped what came back

    It reads /metrics, needs nothing else on the server and changes nothing there. If the server
    goes away, it waits for it. Ctrl-C ends. If the output is no terminal, --once is implied.
    """
    server, console = Server(url, api_key), terminal()
    end = _End()
    if once or not console.is_terminal:
        first = server.scrape(time.monotonic())
        end.wait(interval)
        now = server.scrape(time.monotonic())
        console.print(screen(server.url, (now, now.since(first)), ""))
        return
    watch = Watch(server)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watch.look(time.monotonic(), time.strftime("%H:%M:%S"))
            live.update(screen(server.url, watch.shown, watch.trouble), refresh=True)
            end.wait(interval)


class _End:
    """Ends the program on Ctrl-C and SIGTERM, with a clean terminal.

    Python drops what a handler raises while an object is finalized, as a response is, so the
    signal is remembered as well.
    """

    def __init__(self) -> None:
        self._status = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._leave)

    def wait(self, seconds: float) -> None:
        # A signal just before a sleep begins is seen when that ends, so none is long.
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._status:
                sys.exit(self._status)
            time.sleep(min(left_s, 0.5))

    def _leave(self, number: int, _: object) -> None:
        self._status = 128 + number
        sys.exit(self._status)


class Watch:
    """Looks at a server again and again. `shown`: what it says now, and what was added; None until
    it was seen twice. `trouble`: why it does not answer, and since when; "" if it does."""

    def __init__(self, server: Server) -> None:
        self.shown: tuple[Scrape, Scrape] | None = None
        self.trouble = self._gone_at = ""
        self._server = server
        self._scrapes: deque[Scrape] = deque()

    def look(self, now: float, wall: str) -> None:
        """Scrape once. `now`: monotonic seconds. `wall`: the time of day."""
        try:
            found = self._server.scrape(now)
        except ToldError as error:
            self._gone_at = self._gone_at or wall
            self.trouble = f"{shown(str(error))}\nSo since {self._gone_at}; asking again."
            return
        if self._gone_at:  # what happened while it was gone is no rate of now
            self._scrapes.clear()
            self.trouble = self._gone_at = ""
        self._scrapes.append(found)
        while len(self._scrapes) > 2 and self._scrapes[1].at <= now - WINDOW_S:
            self._scrapes.popleft()
        if len(self._scrapes) > 1:
            self.shown = found, found.since(self._scrapes[0])


# --- the screen -----------------------------------------------------------------------------
BAR = 20  # characters
# Where the tokens of a prompt were: the word for it, and its colour.
WHERE = {"vram": ("VRAM", "cyan"), "dram": ("DRAM", "magenta"), "disk": ("disk", "blue")}
# Outcomes of decisions that cost something: KV kept for nobody, or gone when it was needed.
BAD_OUTCOMES = ("expired", "pressure", "diverged", "never", "recomputed")
NUM_WORST = 3
SLOW_S = 1.0  # how long a disk may owe an answer before the screen says so

Facts = list[str]  # what a row says, in rich's markup; an empty one is left out
Part = tuple[str, float, str]  # of a bar: its name, its share of the whole, its colour


def screen(url: str, seen: tuple[Scrape, Scrape] | None, trouble: str) -> RenderableType:
    """The whole screen. `seen`: what a Watch has shown. `trouble`: why that is old, "" if it is
    not."""
    head = Text.assemble(("continuum top  ", "bold"), url, no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head, *([Text(trouble, "bold red")] if trouble else [])]
    ends = "Ctrl-C ends."
    if seen is not None:
        now, added = seen
        num_engines = len(now.each("vllm:kv_cache_usage_perc")) or 1
        ends = f"Rates are of the last {added.at:.0f} s. {ends}"
        models = sorted({*now.by("vllm:num_requests_running", "model_name")} - {""})
        head.append(f"  {', '.join(models)}", "bold")
        head.append(f"  {num_engines} engines" if num_engines > 1 else "")
        off = now.each("continuum:switched_on").count(0.0)
        where = f" on {off}" if off < num_engines else ""
        state = f"off{where}: the server's log says why" if off else "on"
        head.append("  ").append(state, "bold yellow" if off else "bold green")
        for rows in (_shares(now, added, num_engines), _rates(now, added)):
            names = Column(width=11, style="bold", no_wrap=True)
            table = Table.grid(names, Column(ratio=1, overflow="fold"), padding=(0, 1))
            for row, facts in rows.items():
                if facts:
                    table.add_row(row, "  ".join(filter(None, facts)))
            parts += [Text(), table]
    return Group(*parts, Text(), Text(ends, "dim"))


# --- VRAM, the tiers below it, and where prompts were -----------------------------------------
def _shares(now: Scrape, added: Scrape, num_engines: int) -> dict[str, Facts]:
    used = now.total("vllm:kv_cache_usage_perc") / num_engines
    blocks = now.total("continuum:vram_blocks") or 1.0
    pinned = now.total("continuum:pinned_blocks") / blocks
    stores = now.total("continuum:held_blocks") / blocks - pinned
    vram = [("requests", max(0.0, used - pinned - stores), "green")]
    vram += [("stores", stores, "blue"), ("pins", pinned, "cyan")]
    return {
        "VRAM": [_bar(vram), f"{_percent(used)}:", *map(_named, vram)],
        "DRAM": _dram(now, added),
        "disk": (disk := _disk(now, added)),
        "prompts": _prompts(added, bool(disk)),
    }


def _tier(now: Scrape, tier: str, up: list[float], more: Facts) -> Facts:
    """How full a tier is, and `more`. `up`: of each engine, 1 if it has the tier."""
    down = up.count(0.0)
    if down == len(up):
        key = f"continuum_{tier}_bytes".upper()
        return [f"[dim]none: the log says why; {key} sets its size[/]"]
    capacity = now.total(f"continuum:{tier}_capacity_blocks")
    used = ratio(now.total(f"continuum:{tier}_blocks"), capacity) or 0.0
    return [
        _bar([(tier, used, WHERE[tier][1])]),
        _percent(used),
        size(now.total(f"continuum:{tier}_used_bytes")),
        *more,
        f"[yellow]none on {down} of {len(up)} engines[/]" if down else "",
    ]


def _dram(now: Scrape, added: Scrape) -> Facts:
    capacity = now.total("continuum:dram_capacity_blocks")
    wanted = now.total("continuum:dram_wanted_blocks")
    grows = f"{capacity:,.0f} of {wanted:,.0f} blocks wanted" if capacity < wanted else ""
    evicted = _per_s(added, "continuum:dram_evicted_blocks_total", "evicted")
    return _tier(now, "dram", now.each("continuum:tier_up"), [grows, evicted])


def _disk(now: Scrape, added: Scrape) -> Facts:
    """Of several engines, what the one that is worst off says."""
    if not now.total("continuum:disk_wanted_bytes"):
        return []
    budget = min(now.each("continuum:disk_budget_fill"), default=0.0)  # what is left of a day's
    silent = max(now.each("continuum:disk_oldest_op_seconds"), default=0.0)
    failures = now.by("continuum:disk_failures_total", "reason")
    wrong = failures.get("corrupt", 0.0) + failures.get("eio", 0.0)
    more = [
        f"read {_gb(added, 'continuum:disk_read_bytes_total')}",
        f"written {_gb(added, 'continuum:disk_written_bytes_total')}",
        _styled(f"budget {_percent(budget)}", "" if budget else "yellow"),
        _per_s(added, "continuum:disk_unsaved_blocks_total", "lost unwritten"),
        f"[red]silent for {seconds(silent)}[/]" if silent > SLOW_S else "",
        f"[red]{wrong:,.0f} errors[/]" if wrong else "",
    ]
    return _tier(now, "disk", now.each("continuum:disk_up"), more)


def _prompts(added: Scrape, has_disk: bool) -> Facts:
    prompt = added.total("continuum:prompt_tokens_total")
    if not prompt:
        return [_bar([]), "[dim]none admitted[/]"]
    hits = added.by("continuum:hit_tokens_total", "tier")
    tiers = [tier for tier in WHERE if has_disk or tier != "disk"]
    parts = [(WHERE[tier][0], hits.get(tier, 0.0) / prompt, WHERE[tier][1]) for tier in tiers]
    # A preempted turn is looked up twice but counted once, so the difference may fall below 0.
    parts.append(("computed", max(0.0, 1.0 - sum(hits.values()) / prompt), "yellow"))
    return [_bar(parts), *map(_named, parts)]


# --- what happens -----------------------------------------------------------------------------
def _rates(now: Scrape, added: Scrape) -> dict[str, Facts]:
    waiting = now.total("vllm:num_requests_waiting")
    preempted = added.total("vllm:num_preemptions_total") / added.at
    decisions = added.by("continuum:decisions_total", "decision").items()
    ended = now.by("continuum:pins_ended_total", "cause")
    busy = added.total("continuum:hook_seconds_sum") / added.at
    return {
        "requests": [
            f"{now.total('vllm:num_requests_running'):,.0f} running",
            _styled(f"{waiting:,.0f} waiting", "yellow" if waiting else ""),
            f"{added.total('vllm:request_success_total') / added.at:.3g} done/s",
            _styled(f"{preempted:.3g} preempted/s", "red" if preempted else ""),
        ],
        "gate": _gate(now),
        "tokens/s": [
            f"{added.total('vllm:prompt_tokens_total') / added.at:,.0f} of prompts",
            f"{added.total('vllm:generation_tokens_total') / added.at:,.0f} generated",
            *_against_stock(added),
        ],
        "decisions/s": [
            f"{sum(num for _, num in decisions) / added.at:.3g}:",
            *(f"{name(each)} {num / added.at:.3g}" for each, num in decisions),
        ],
        "pins": [
            f"{now.total('continuum:pins_live'):,.0f} live",
            f"{added.total('continuum:pins_started_total') / added.at:.3g} new/s",
            *(f"{name(why)} {_percent(num / sum(ended.values()))}" for why, num in _most(ended)),
        ],
        "stores": _copies("store", "continuum:stored_bytes_total", now, added),
        "loads": _copies("load", "continuum:loaded_bytes_total", now, added),
        "lost by": _worst(now.by("continuum:outcomes_total", "decision_outcome")),
        "our hooks": [f"{100 * busy:.2g} % of the time"],
    }


def _against_stock(added: Scrape) -> Facts:
    """Of the prompts, what only we kept, and what stock vLLM would have kept too."""
    kept = added.by("continuum:tokens_against_stock_total", "kept")
    prompt = added.total("continuum:prompt_tokens_total")
    if not prompt or not kept or kept.get("unknown"):
        return []
    ours, too = (_percent(kept.get(of, 0.0) / prompt) for of in ("only_ours", "stock_too"))
    return [f"[green]only ours {ours}[/]", f"stock too {too}"]


def _gate(now: Scrape) -> Facts:
    """What the programs under way need and what there is; how many first turns wait for more.
    Nothing if it is off, or no program has come yet."""
    under_way, held = now.total("continuum:working_set_programs"), now.total("continuum:gate_held")
    let_in = _most(now.by("continuum:gate_opened_total", "because"))
    if not (under_way or held or let_in):
        return []
    wanted = ratio(now.total("continuum:working_set_blocks"), now.total("continuum:vram_blocks"))
    wants = f"want {_percent(wanted or 0.0)} of VRAM a cycle"
    why = (f"{name(reason)} {num:,.0f}" for reason, num in let_in)
    return [f"{under_way:,.0f} under way", wants, f"{held:,.0f} held", *why]


def _copies(kind: str, num_bytes: str, now: Scrape, added: Scrape) -> Facts:
    """Copies in one direction. How many were not done counts from the server's start."""
    num = added.total(f"continuum:{kind}_seconds_count")
    mean_s = ratio(added.total(f"continuum:{kind}_seconds_sum"), num)
    settled = now.by(f"continuum:{kind}s_total", "outcome")
    bad = sum(settled.values()) - settled.get("done", 0.0)
    return [
        f"{now.total('continuum:transfers_in_flight', direction=kind):,.0f} in flight",
        f"{num / added.at:.3g}/s",
        _gb(added, num_bytes),
        "" if mean_s is None else f"{seconds(mean_s)} each",
        f"[red]{bad:,.0f} not done[/]" if bad else "",
    ]


def _worst(outcomes: Mapping[str, float]) -> Facts:
    """The decisions since the start that cost something, the most frequent kind first."""
    total = sum(outcomes.values())
    bad = [each for each in _most(outcomes) if each[0].partition("_")[2] in BAD_OUTCOMES]
    worst = ((name(each).replace("_", " ", 1), num) for each, num in bad[:NUM_WORST])
    lost = [f"{each} {_percent(num / total)}" for each, num in worst]
    return [*(lost or ["[green]nothing[/]"]), f"of {total:,.0f} decisions"]


def _most(counts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Those above 0, the most frequent first."""
    return sorted(((k, n) for k, n in counts.items() if n), key=lambda one: -one[1])


def _per_s(added: Scrape, metric: str, what: str) -> str:
    return f"{num / added.at:.3g} {what}/s" if (num := added.total(metric)) else ""


def _gb(added: Scrape, metric: str) -> str:
    return f"{added.total(metric) / added.at / 1e9:.3g} GB/s"


def _styled(text: str, style: str) -> str:
    return f"[{style}]{text}[/]" if style else text


def _named(part: Part) -> str:
    return _styled(f"{part[0]} {_percent(part[1])}", part[2])


def _bar(parts: Iterable[Part]) -> str:
    """Shares of one whole, side by side; a share above 0 takes at least one character."""
    bar, left = "", BAR
    for _, share, style in parts:
        width = min(left, max(round(share * BAR), 1 if share > 0 else 0))
        bar += f"[{style}]{'█' * width}[/]"
        left -= width
    return f"{bar}[dim]{'░' * left}[/]"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.1f} %"
