"""TopView: the numbers of `continuum top` as one screen, 80 columns by 24 rows or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from continuum_connector.tools.analysis.words import seconds, size
from continuum_connector.tools.cli.rates import Numbers, by_number

BAR = 20  # characters
PINS, STORES, REQUESTS = "cyan", "blue", "green"
# Where the tokens of a prompt were: the word for it, and its colour.
WHERE = {"vram": ("VRAM", "cyan"), "dram": ("DRAM", "magenta"), "disk": ("disk", "blue")}
WHERE["computed"] = ("computed", "yellow")
NO_CONNECTOR = (
    "ContinuumConnector does not run there, so there is nothing of it to show. To run it, serve "
    'with: --kv-transfer-config \'{"kv_connector":"ContinuumConnector"}\''
)
NUM_WORST = 3
SLOW_S = 1.0  # how long a disk may owe an answer before the screen says so
GAP = "  "  # between two facts in a row

Fact = str | tuple[str, str] | Text  # a text, or one with its style
Row = tuple[str, Text]


def screen(url: str, shown: Numbers | None, trouble: str) -> RenderableType:
    """The whole screen. `trouble`: why the numbers are old, "" if they are not."""
    parts: list[RenderableType] = [_head(url, shown)]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    last = "seconds"
    if shown is not None:
        served, kept, last = shown["served"], shown["kept"], f"{shown['interval_s']:.0f} s"
        parts += [Text(), _table(_shares(served, kept)), Text(), _table(_rates(served, kept))]
        if kept is None:
            parts += [Text(), Text(NO_CONNECTOR)]
    return Group(*parts, Text(), Text(f"Rates are of the last {last}. Ctrl-C ends.", "dim"))


def _table(rows: Sequence[Row | None]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=11, style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for row in filter(None, rows):
        table.add_row(*row)
    return table


def _row(name: str, *facts: Fact | None) -> Row:
    said = [Text(*fact) if isinstance(fact, tuple) else fact for fact in facts if fact]
    return name, Text(GAP).join(Text(fact) if isinstance(fact, str) else fact for fact in said)


def _head(url: str, shown: Numbers | None) -> Text:
    head = Text.assemble(("continuum top  ", "bold"), url, no_wrap=True, overflow="ellipsis")
    if shown is None:
        return head
    served, kept = shown["served"], shown["kept"]
    head.append(f"  {', '.join(served['models'])}", "bold")
    if served["num_engines"] > 1:
        head.append(f"  {served['num_engines']} engines")
    if kept is not None and (off := kept["num_switched_off"]):
        where = "" if off == served["num_engines"] else f" on {off}"
        head.append("  ").append(f"off{where}: the server's log says why", "bold yellow")
    elif kept is not None:
        head.append("  ").append("on", "bold green")
    return head


def _shares(served: Numbers, kept: Numbers | None) -> list[Row | None]:
    """VRAM, the tiers below it, and where prompts were."""
    num_engines, used = served["num_engines"], served["vram_used"]
    if kept is None:
        rows: list[Row | None] = [_row("VRAM", _bar((used, REQUESTS)), _percent(used))]
        if (hit := served["vram_hit"]) is not None:
            bar = _bar((hit, WHERE["vram"][1]))
            rows.append(_row("prompts", bar, f"{_percent(hit)} found in VRAM"))
        return rows
    disk = kept["disk"]
    return [
        _vram(used, kept),
        _dram(kept, num_engines),
        disk and _disk(disk, num_engines),
        _hits(kept["hit"], disk is not None),
    ]


def _vram(used: float, kept: Numbers) -> Row:
    pinned, stores = kept["pinned"], kept["held_for_stores"]
    if pinned is None or stores is None:
        return _row("VRAM", _bar((used, REQUESTS)), _percent(used))
    parts = {"requests": (max(0.0, used - pinned - stores), REQUESTS)}
    parts |= {"stores": (stores, STORES), "pins": (pinned, PINS)}
    said = [(f"{of} {_percent(share)}", style) for of, (share, style) in parts.items()]
    return _row("VRAM", _bar(*parts.values()), f"{_percent(used)}:", *said)


def _dram(kept: Numbers, num_engines: int) -> Row:
    if not kept["tier_up"]:
        none = "no tier: the log says why; CONTINUUM_DRAM_BYTES sets its size"
        return _row("DRAM", (none, "dim"))
    capacity, wanted = kept["dram_capacity_blocks"], kept["dram_wanted_blocks"]
    writing, evicted = kept["dram_writing_blocks"], kept["dram_evicted_per_s"]
    without = kept["num_without_tier"]
    return _row(
        "DRAM",
        _bar((kept["dram_used"] or 0.0, WHERE["dram"][1])),
        _percent(kept["dram_used"]),
        f"{capacity:,}" + (f" of {wanted:,} blocks wanted" if capacity < wanted else " blocks"),
        size(kept["dram_used_bytes"]),
        f"{writing:,} being written" if writing else None,
        f"{evicted:.3g} evicted/s" if evicted else None,
        (f"no tier on {without} of {num_engines} engines", "yellow") if without else None,
    )


def _disk(disk: Numbers, num_engines: int) -> Row:
    down, budget, unsaved = disk["num_down"], disk["budget_fill"], disk["unsaved_per_s"]
    if down >= num_engines:
        none = "none yet, or it was given up: the server's log says which, and why"
        return _row("disk", (none, "yellow"))
    silent, wrong = disk["oldest_op_s"], disk["num_wrong"]
    return _row(
        "disk",
        _bar((disk["used"] or 0.0, WHERE["disk"][1])),
        _percent(disk["used"]),
        size(disk["used_bytes"]),
        f"read {_gb(disk['reads'])}",
        f"written {_gb(disk['writes'])}",
        (f"budget {_percent(budget)}", "" if budget else "yellow"),
        f"{unsaved:.3g} lost unwritten/s" if unsaved else None,
        (f"silent for {seconds(silent)}", "red") if silent > SLOW_S else None,
        (f"{wrong:,} errors", "red") if wrong else None,
        (f"none on {down} of {num_engines} engines", "yellow") if down else None,
    )


def _hits(hit: dict[str, float | None], has_disk: bool) -> Row:
    if hit["computed"] is None:
        return _row("prompts", _bar(), ("none admitted", "dim"))
    found = {of: hit[of] or 0.0 for of in WHERE if of != "disk" or has_disk}
    said = [(f"{WHERE[of][0]} {_percent(share)}", WHERE[of][1]) for of, share in found.items()]
    return _row("prompts", _bar(*((share, WHERE[of][1]) for of, share in found.items())), *said)


def _rates(served: Numbers, kept: Numbers | None) -> list[Row | None]:
    waiting, preempted = served["num_waiting"], served["preempted_per_s"]
    requests = _row(
        "requests",
        f"{served['num_running']:,} running",
        (f"{waiting:,} waiting", "yellow" if waiting else ""),
        f"{served['finished_per_s']:.3g} done/s",
        (f"{preempted:.3g} preempted/s", "red" if preempted else ""),
    )
    tokens = (
        f"{served['prompt_per_s']:,.0f} of prompts",
        f"{served['output_per_s']:,.0f} generated",
    )
    if kept is None:
        return [requests, _row("tokens/s", *tokens)]
    per_s, ended = kept["decisions_per_s"], sum(kept["pins_ended"].values())
    ends = (f"{cause} {_percent(num / ended)}" for cause, num in by_number(kept["pins_ended"]))
    epochs = by_number(kept["epochs"])
    return [
        requests,
        kept["gate"] and _gate(kept["gate"]),
        _row("tokens/s", *tokens, *_against_stock(kept["hit"])),
        _row(
            "decisions/s",
            f"{sum(per_s.values()):.3g}:",
            *(f"{name} {num:.3g}" for name, num in per_s.items()),
        ),
        _row(
            "pins",
            f"{kept['num_pins']:,} live",
            f"{kept['num_pinned_blocks']:,} blocks",
            f"{kept['pins_per_s']:.3g} new/s",
        ),
        _row("ended by", *(ends if ended else [("none has ended", "dim")])),
        _row("epochs", *(f"{cause} {num:,}" for cause, num in epochs)) if epochs else None,
        _copies("stores", kept["stores"]),
        _copies("loads", kept["loads"]),
        _row("lost by", *_worst(kept)),
        _row("forecasts", *_forecasts(kept["forecasts"])),
        _row("our hooks", *_hooks(kept["hooks"])),
    ]


def _against_stock(hit: dict[str, float | None]) -> list[Fact]:
    """Of the prompts, what only we kept, and what stock vLLM would have kept too."""
    ours, too = hit.get("only_ours"), hit.get("stock_too")
    if ours is None or too is None or hit["unknown"]:
        return []
    return [(f"only ours {_percent(ours)}", "green"), f"stock too {_percent(too)}"]


def _gate(gate: Numbers) -> Row:
    """What the programs under way need and what there is; how many first turns wait for more."""
    let_in = (f"{why} {num:,}" for why, num in by_number(gate["let_in"]))
    wants = f"want {_percent(gate['wanted'])} of VRAM a cycle"
    under_way, held = f"{gate['num_under_way']:,} under way", f"{gate['num_held']:,} held"
    return _row("gate", under_way, wants, held, *let_in)


def _copies(name: str, copies: Numbers) -> Row:
    mean_s, num_bad = copies["mean_s"], copies["num_bad"]
    return _row(
        name,
        f"{copies['in_flight']:,} in flight",
        f"{copies['per_s']:.3g}/s",
        _gb(copies),
        None if mean_s is None else f"{seconds(mean_s)} each",
        (f"{num_bad:,} not done", "red") if num_bad else None,
    )


def _worst(kept: Numbers) -> list[Fact]:
    if not kept["outcomes"]:
        return [("no decision has shown yet what it was worth", "dim")]
    if not kept["worst"]:
        return [(f"nothing was lost by {kept['outcomes']:,} decisions", "green")]
    said = [f"{one['name']} {_percent(one['share'])}" for one in kept["worst"][:NUM_WORST]]
    return [*said, f"of {kept['outcomes']:,} decisions"]


def _forecasts(found: Numbers | None) -> list[Fact]:
    if found is None:
        return [("none has shown yet whether it was right", "dim")]
    if not found["error"]:
        return [(f"all {found['num']:,} came as often as predicted", "green")]
    worst = f"worst: of {found['num_worst']:,} with {found['worst']} %"
    return [f"{_percent(found['error'])} off", f"{worst} {_percent(found['came'])} came"]


def _hooks(hooks: list[Numbers]) -> list[Fact]:
    busy = sum(hook["busy"] for hook in hooks)
    share = f"{100 * busy:.2g} % of the time", "red" if busy > 0.05 else ""
    most = [f"most in {one['name']}  {seconds(one['mean_s'])} a call" for one in hooks[:1]]
    return [share, *most]


def _gb(copies: Numbers) -> str:
    return f"{copies['bytes_per_s'] / 1e9:.3g} GB/s"


def _bar(*parts: tuple[float, str]) -> Text:
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
