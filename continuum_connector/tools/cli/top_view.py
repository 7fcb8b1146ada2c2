"""TopView: the numbers of `continuum top` as one screen, 80 columns by 24 rows or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from continuum_connector.tools.analysis.report import seconds, size
from continuum_connector.tools.cli.rates import (
    Copies,
    Disk,
    Gate,
    Kept,
    Numbers,
    Served,
)

BAR = 20  # characters
PINS, STORES, REQUESTS = "cyan", "blue", "green"
VRAM, DRAM, DISK, COMPUTED = "cyan", "magenta", "blue", "yellow"
NO_CONNECTOR = (
    "ContinuumConnector does not run there, so there is nothing of it to show. To run it, serve "
    'with: --kv-transfer-config \'{"kv_connector":"ContinuumConnector"}\''
)
NUM_WORST = 3
SLOW_S = 1.0  # how long a disk may owe an answer before the screen says so
GAP = "  "  # between two facts in a row


def screen(url: str, shown: Numbers | None, trouble: str) -> RenderableType:
    """The whole screen. `trouble`: why the numbers are old, "" if they are not."""
    parts: list[RenderableType] = [_head(url, shown)]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if shown is not None:
        parts += [Text(), _shares(shown.served, shown.kept), Text(), _rates(shown)]
        if shown.kept is None:
            parts += [Text(), Text(NO_CONNECTOR)]
    parts += [Text(), Text(f"Rates are of the last {_last(shown)}. Ctrl-C ends.", "dim")]
    return Group(*parts)


def _last(shown: Numbers | None) -> str:
    return "seconds" if shown is None else f"{shown.interval_s:.0f} s"


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
    where = "" if kept.num_switched_off == num_engines else f" on {kept.num_switched_off}"
    return f"off{where}: the server's log says why", "bold yellow"


def _shares(served: Served, kept: Kept | None) -> Table:
    table = _rows()
    table.add_row("VRAM", _vram(served, kept))
    if kept is not None:
        table.add_row("DRAM", _dram(kept, served.num_engines))
        if kept.disk is not None:
            table.add_row("disk", _disk(kept.disk, served.num_engines))
        table.add_row("prompts", _hits(kept))
    elif served.vram_hit is not None:
        bar = _bar([(served.vram_hit, VRAM)])
        table.add_row("prompts", _facts(bar, f"{_percent(served.vram_hit)} found in VRAM"))
    return table


def _rates(shown: Numbers) -> Table:
    served, kept = shown.served, shown.kept
    table = _rows()
    table.add_row("requests", _requests(served))
    if kept is not None and kept.gate is not None:
        table.add_row("gate", _gate(kept.gate))
    tokens = (f"{served.prompt_per_s:,.0f} of prompts", f"{served.output_per_s:,.0f} generated")
    table.add_row("tokens/s", _facts(*tokens, *(_against_stock(kept) if kept is not None else ())))
    if kept is None:
        return table
    total = sum(kept.decisions_per_s.values())
    decisions = (f"{name} {num:.3g}" for name, num in kept.decisions_per_s.items())
    table.add_row("decisions/s", _facts(f"{total:.3g}:", *decisions))
    pins = (f"{kept.num_pins:,} live", f"{kept.num_pinned_blocks:,} blocks")
    table.add_row("pins", _facts(*pins, f"{kept.pins_per_s:.3g} new/s"))
    table.add_row("ended by", _ends(kept))
    if any(kept.epochs.values()):
        table.add_row("epochs", _epochs(kept))
    table.add_row("stores", _copies(kept.stores))
    table.add_row("loads", _copies(kept.loads))
    table.add_row("lost by", _worst(kept))
    table.add_row("forecasts", _forecasts(kept))
    table.add_row("our hooks", _hooks(kept))
    return table


def _vram(served: Served, kept: Kept | None) -> Text:
    used = _percent(served.vram_used)
    if kept is None or kept.pinned is None or kept.held_for_stores is None:
        return _facts(_bar([(served.vram_used, REQUESTS)]), used)
    rest = max(0.0, served.vram_used - kept.pinned - kept.held_for_stores)
    parts = [(rest, REQUESTS), (kept.held_for_stores, STORES), (kept.pinned, PINS)]
    names = ("requests", "stores", "pins")
    said = [
        Text(f"{name} {_percent(share)}", color)
        for name, (share, color) in zip(names, parts, strict=True)
    ]
    return _facts(_bar(parts), f"{used}:", *said)


def _dram(kept: Kept, num_engines: int) -> Text:
    if not kept.tier_up:
        return Text("no tier: the log says why; CONTINUUM_DRAM_BYTES sets its size", "dim")
    short = kept.dram_capacity_blocks < kept.dram_wanted_blocks
    wanted = f" of {kept.dram_wanted_blocks:,} blocks wanted" if short else " blocks"
    facts: list[str | Text] = [f"{kept.dram_capacity_blocks:,}{wanted}", size(kept.dram_used_bytes)]
    if kept.dram_writing_blocks:
        facts.append(f"{kept.dram_writing_blocks:,} being written")
    if kept.dram_evicted_per_s:
        facts.append(f"{kept.dram_evicted_per_s:.3g} evicted/s")
    if kept.num_without_tier:
        facts.append(Text(f"no tier on {kept.num_without_tier} of {num_engines} engines", "yellow"))
    return _facts(_bar([(kept.dram_used or 0.0, DRAM)]), _percent(kept.dram_used), *facts)


def _disk(disk: Disk, num_engines: int) -> Text:
    if disk.num_down >= num_engines:
        return Text("none yet, or it was given up: the server's log says which, and why", "yellow")
    rates = (("read", disk.reads), ("written", disk.writes))
    facts: list[str | Text] = [size(disk.used_bytes)]
    facts += [f"{verb} {copies.bytes_per_s / 1e9:.3g} GB/s" for verb, copies in rates]
    facts.append(Text(f"budget {_percent(disk.budget_fill)}", "" if disk.budget_fill else "yellow"))
    if disk.unsaved_per_s:
        facts.append(f"{disk.unsaved_per_s:.3g} lost unwritten/s")
    if disk.oldest_op_s > SLOW_S:
        facts.append(Text(f"silent for {seconds(disk.oldest_op_s)}", "red"))
    if disk.num_wrong:
        facts.append(Text(f"{disk.num_wrong:,} errors", "red"))
    if disk.num_down:
        facts.append(Text(f"none on {disk.num_down} of {num_engines} engines", "yellow"))
    return _facts(_bar([(disk.used or 0.0, DISK)]), _percent(disk.used), *facts)


def _hits(kept: Kept) -> Text:
    colors = {"vram": VRAM, "dram": DRAM, "disk": DISK, "computed": COMPUTED}
    names = {"vram": "VRAM", "dram": "DRAM", "disk": "disk", "computed": "computed"}
    if kept.hit["computed"] is None:
        return _facts(_bar([]), Text("none admitted", "dim"))
    parts = {of: kept.hit[of] or 0.0 for of in colors if of != "disk" or kept.disk is not None}
    said = [Text(f"{names[of]} {_percent(share)}", colors[of]) for of, share in parts.items()]
    return _facts(_bar([(share, colors[of]) for of, share in parts.items()]), *said)


def _against_stock(kept: Kept) -> tuple[Text, ...]:
    """Of the prompts, what only we kept, and what stock vLLM would have kept too."""
    ours, too = kept.hit.get("only_ours"), kept.hit.get("stock_too")
    if ours is None or too is None or kept.hit["unknown"]:
        return ()
    return Text(f"only ours {_percent(ours)}", "green"), Text(f"stock too {_percent(too)}")


def _requests(served: Served) -> Text:
    waits = Text(f"{served.num_waiting:,} waiting", "yellow" if served.num_waiting else "")
    done = f"{served.finished_per_s:.3g} done/s"
    return _facts(f"{served.num_running:,} running", waits, done, _preempted(served))


def _preempted(served: Served) -> Text:
    style = "red" if served.preempted_per_s else ""
    return Text(f"{served.preempted_per_s:.3g} preempted/s", style)


def _gate(gate: Gate) -> Text:
    """What the programs under way need and what there is; how many first turns wait for more."""
    wants = f"want {_percent(gate.wanted)} of VRAM a cycle"
    by_number = sorted(gate.let_in.items(), key=lambda each: -each[1])
    let_in = (f"{why} {num:,}" for why, num in by_number if num)
    return _facts(f"{gate.num_under_way:,} under way", wants, f"{gate.num_held:,} held", *let_in)


def _epochs(kept: Kept) -> Text:
    """Epochs since the start, each of which emptied every tier below VRAM."""
    by_number = sorted(kept.epochs.items(), key=lambda each: -each[1])
    return _facts(*(f"{cause} {num:,}" for cause, num in by_number if num))


def _ends(kept: Kept) -> Text:
    ended = {cause: num for cause, num in kept.pins_ended.items() if num}
    total = sum(ended.values())
    by_number = sorted(ended.items(), key=lambda each: -each[1])
    said = (f"{cause} {_percent(num / total)}" for cause, num in by_number)
    return _facts(*said) if ended else Text("none has ended", "dim")


def _copies(copies: Copies) -> Text:
    facts: list[str | Text] = [f"{copies.in_flight:,} in flight", f"{copies.per_s:.3g}/s"]
    facts.append(f"{copies.bytes_per_s / 1e9:.3g} GB/s")
    if copies.mean_s is not None:
        facts.append(f"{seconds(copies.mean_s)} each")
    if copies.num_bad:
        facts.append(Text(f"{copies.num_bad:,} not done", "red"))
    return _facts(*facts)


def _worst(kept: Kept) -> Text:
    if not kept.outcomes:
        return Text("no decision has shown yet what it was worth", "dim")
    if not kept.worst:
        return Text(f"nothing was lost by {kept.outcomes:,} decisions", "green")
    said = (f"{one.name} {_percent(one.share)}" for one in kept.worst[:NUM_WORST])
    return _facts(*said, f"of {kept.outcomes:,} decisions")


def _forecasts(kept: Kept) -> Text:
    found = kept.forecasts
    if found is None:
        return Text("none has shown yet whether it was right", "dim")
    if not found.error:
        return Text(f"all {found.num:,} came as often as predicted", "green")
    worst = f"worst: of {found.num_worst:,} with {found.worst} % {_percent(found.came)} came"
    return _facts(f"{_percent(found.error)} off", worst)


def _hooks(kept: Kept) -> Text:
    busy = sum(hook.busy for hook in kept.hooks)
    share = Text(f"{100 * busy:.2g} % of the time", "red" if busy > 0.05 else "")
    if not kept.hooks:
        return share
    most = kept.hooks[0]
    return _facts(share, f"most in {most.name}", f"{seconds(most.mean_s)} a call")


def _rows() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=11, style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    return table


def _facts(*facts: str | Text) -> Text:
    return Text(GAP).join(Text(each) if isinstance(each, str) else each for each in facts)


def _bar(parts: Sequence[tuple[float, str]]) -> Text:
    """A bar of shares of one whole, side by side; a share above 0 takes at least one character."""
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
