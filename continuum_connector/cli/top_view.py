"""TopView: the numbers of `continuum top` as one screen, 80 columns by 24 rows or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from continuum_connector.analysis.report import seconds, size
from continuum_connector.cli.rates import Copies, Kept, Numbers, Served

BAR = 24  # characters
PINS, STORES, REQUESTS, DRAM, VRAM, COMPUTED = "cyan", "blue", "green", "magenta", "cyan", "yellow"
NO_CONNECTOR = (
    "ContinuumConnector does not run there, so there is nothing of it to show. To run it, serve "
    'with: --kv-transfer-config \'{"kv_connector":"ContinuumConnector","kv_role":"kv_both"}\''
)
NUM_WORST, NUM_HOOKS = 3, 2


def screen(url: str, shown: Numbers | None, trouble: str) -> RenderableType:
    """Everything; `trouble` is why the numbers are old, "" if they are not."""
    parts: list[RenderableType] = [_head(url, shown)]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if shown is not None:
        parts += [Text(), _served(shown.served, shown.kept)]
        parts += [_kept(shown.kept)] if shown.kept is not None else [Text(), Text(NO_CONNECTOR)]
    parts.append(Text("Ctrl-C ends. Rates are of the last seconds, shares of the whole.", "dim"))
    return Group(*parts)


def _head(url: str, shown: Numbers | None) -> Text:
    head = Text.assemble(("continuum top  ", "bold"), url, no_wrap=True, overflow="ellipsis")
    if shown is None:
        return head
    served, kept = shown.served, shown.kept
    head.append(f"  {', '.join(served.models)}", "bold")
    if served.num_engines > 1:
        head.append(f"  {served.num_engines} engines")
    if kept is not None:
        head.append("  ")
        head.append(*_state(kept, served.num_engines))
    return head


def _state(kept: Kept, num_engines: int) -> tuple[str, str]:
    if not kept.num_switched_off:
        return "on", "bold green"
    if kept.num_switched_off == num_engines:
        return "switched off", "bold yellow"
    return f"switched off on {kept.num_switched_off}", "bold yellow"


def _served(served: Served, kept: Kept | None) -> Table:
    table = _rows()
    used = [(served.vram_used, REQUESTS)]
    words = f"{_percent(served.vram_used)} of VRAM used"
    if kept is not None and kept.pinned is not None and kept.held_for_stores is not None:
        rest = max(0.0, served.vram_used - kept.pinned - kept.held_for_stores)
        used = [(rest, REQUESTS), (kept.held_for_stores, STORES), (kept.pinned, PINS)]
        pins, stores = _percent(kept.pinned), _percent(kept.held_for_stores)
        words = f"{_percent(served.vram_used)} used: requests {_percent(rest)}, "
        words += f"stores {stores}, pins {pins}"
    table.add_row("VRAM", Text.assemble(_bar(used), f" {words}"))
    if kept is not None:
        table.add_row("DRAM", _dram(kept))
    waiting = ("yellow", "bold")[served.num_waiting > served.num_running]
    table.add_row(
        "requests",
        Text.assemble(
            f"{served.num_running:,} running, ",
            (f"{served.num_waiting:,} waiting", waiting if served.num_waiting else ""),
            f"; {served.finished_per_s:.3g} done/s, {served.preempted_per_s:.3g} preempted/s",
        ),
    )
    tokens = f"{served.prompt_per_s:,.0f} of prompts, {served.output_per_s:,.0f} generated"
    if kept is None:
        tokens += f"; {_percent(served.vram_hit)} of prompts found in VRAM"
    table.add_row("tokens/s", tokens)
    return table


def _dram(kept: Kept) -> Text:
    if not kept.tier_up:
        return Text("no tier; dram_bytes would add one, or the log says why it went", "dim")
    bar = _bar([(kept.dram_used or 0.0, DRAM)])
    text = f" {_percent(kept.dram_used)} of {kept.dram_capacity_blocks:,} blocks, "
    text += size(kept.dram_used_bytes)
    if kept.dram_writing_blocks:
        text += f", {kept.dram_writing_blocks:,} being written"
    if kept.dram_capacity_blocks < kept.dram_wanted_blocks:
        text += f"; growing to {kept.dram_wanted_blocks:,}"
    return Text.assemble(bar, text)


def _kept(kept: Kept) -> Table:
    table = _rows()
    table.add_row("prompts", _hits(kept))
    decisions = ", ".join(f"{name} {num:.3g}" for name, num in kept.decisions_per_s.items())
    total = sum(kept.decisions_per_s.values())
    table.add_row("decisions/s", f"{total:.3g}: {decisions}")
    table.add_row("pins", _pins(kept))
    table.add_row("stores", _copies(kept.stores))
    table.add_row("loads", _copies(kept.loads))
    table.add_row("worst", _worst(kept))
    table.add_row("our hooks", _hooks(kept))
    return table


def _hits(kept: Kept) -> Text:
    vram, dram, computed = (kept.hit[name] for name in ("vram", "dram", "computed"))
    if computed is None:
        return Text("none admitted in the last seconds", "dim")
    bar = _bar([(vram or 0.0, VRAM), (dram or 0.0, DRAM), (computed, COMPUTED)])
    words = f" found in VRAM {_percent(vram)}, in DRAM {_percent(dram)}; "
    return Text.assemble(bar, words, f"{_percent(computed)} computed")


def _pins(kept: Kept) -> Text:
    text = f"{kept.num_pins:,} live, {kept.num_pinned_blocks:,} blocks, {kept.pins_per_s:.3g} new/s"
    ended = {cause: num for cause, num in kept.pins_ended.items() if num}
    if ended:
        total = sum(ended.values())
        by_number = sorted(ended.items(), key=lambda each: -each[1])
        text += "; ended: " + ", ".join(f"{c} {_percent(n / total)}" for c, n in by_number)
    return Text(text)


def _copies(copies: Copies) -> Text:
    mean = "" if copies.mean_s is None else f", {seconds(copies.mean_s)} each"
    text = f"{copies.in_flight:,} in flight, {copies.per_s:.3g}/s, "
    text += f"{copies.bytes_per_s / 1e9:.3g} GB/s{mean}"
    bad = (f", {copies.num_bad:,} not done", "red") if copies.num_bad else ""
    return Text.assemble(text, bad)


def _worst(kept: Kept) -> Text:
    if not kept.outcomes:
        return Text("no decision has shown yet what it was worth", "dim")
    if not kept.worst:
        return Text(f"nothing lost by {kept.outcomes:,} decisions", "green")
    parts = [f"{one.name} {_percent(one.share)}" for one in kept.worst[:NUM_WORST]]
    return Text(f"{', '.join(parts)} of {kept.outcomes:,} decisions")


def _hooks(kept: Kept) -> Text:
    busy = sum(hook.busy for hook in kept.hooks)
    parts = [f"{hook.name} {seconds(hook.mean_s)}" for hook in kept.hooks[:NUM_HOOKS]]
    most = f"; most in {', '.join(parts)} a call" if parts else ""
    return Text(f"{100 * busy:.2g} % of the time{most}", "red" if busy > 0.05 else "")


def _rows() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=11, style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    return table


def _bar(parts: Sequence[tuple[float, str]]) -> Text:
    """Shares of one whole, side by side; a share above 0 is at least one character."""
    bar, left = Text(), BAR
    for share, style in parts:
        width = min(left, max(round(share * BAR), 1 if share > 0 else 0))
        bar.append("█" * width, style)
        left -= width
    return bar.append("░" * left, "dim")


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.1f} %"
