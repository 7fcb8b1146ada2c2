"""The tables as one picture: what a caller waits for, when copies begin, how fast they are."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.copy_engine.bandwidth import WAYS
from bench.copy_engine.report import Section, size
from bench.copy_engine.submit import AIM_US, LANES

COLOURS = {"engine": "#d1480f", "one copy": "#6e7681"}
OTHERS = ("#0066a8", "#00855f", "#b4568c")

Samples = dict[str, list[float]]


def draw(sections: Sequence[Section], path: Path) -> list[str]:
    """A panel for each section that has one; returns their names. PNG, or what the suffix says."""
    drawn = [(PANELS[each.name], each) for each in sections if each.name in PANELS]
    figure = Figure(figsize=(5.2 * max(1, len(drawn)), 4.4), layout="constrained", dpi=120)
    for at, (panel, section) in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), at)
        panel(axes, section)
        axes.set_title(textwrap.fill(section.title, 56), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))
    figure.savefig(path)
    return [section.name for _, section in drawn]


def _submit(axes: Any, section: Section) -> None:
    """The median of each lane's state over the blocks of a submit, where they are most pieces."""
    keys = [key.split(" blocks, ") for key in section.samples if " blocks, " in key]
    most = max(int(rest.split()[0]) for _, rest in keys)
    blocks = sorted({int(count) for count, _ in keys})
    for lane, colour in zip(LANES, (COLOURS["engine"], *OTHERS), strict=True):
        medians = [
            statistics.median(section.samples[f"{n} blocks, {most} regions, {lane}"])
            for n in blocks
        ]
        axes.plot(blocks, medians, marker="o", color=colour, label=lane)
    axes.axhline(AIM_US, color="black", linewidth=0.8, linestyle="--", label="aim, 1,024 blocks")
    axes.set(xscale="log", yscale="log", xlabel="blocks of a submit", ylabel="µs of the caller")


def _delay(axes: Any, section: Section) -> None:
    """Which share of the batches was issued by then."""
    for way, colour in zip(section.rows, (COLOURS["engine"], *OTHERS), strict=False):
        issued = sorted(section.samples[f"{way[0]}, issued"])
        shares = [(i + 1) / len(issued) for i in range(len(issued))]
        axes.step(issued, shares, where="post", color=colour, label=way[0])
    axes.set(xscale="log", xlabel="ms from hand-over to the first copy", ylabel="share of batches")


def _bandwidth(axes: Any, section: Section) -> None:
    """Stores; dashed where another Python thread computes."""
    chunks = sorted({int(key.split(",")[0]) for key in section.samples})
    for way, colour in zip(WAYS, _colours(WAYS), strict=True):
        for beside, line in (("", "-"), (", contended", "--")):
            found = {c: section.samples.get(f"{c}, store, {way}{beside}") for c in chunks}
            rates = {c: statistics.median(each) for c, each in found.items() if each}
            label = None if beside else way
            axes.plot(
                list(rates), list(rates.values()), line, color=colour, marker=".", label=label
            )
    axes.plot([], [], "--", color="black", label="the same, beside a Python thread")
    axes.set(xscale="log", yscale="log", xlabel="chunk", ylabel="GB/s, stores")
    axes.set_xticks(chunks, [size(chunk) for chunk in chunks], fontsize=7, rotation=30)
    axes.minorticks_off()


def _colours(ways: Sequence[str]) -> list[str]:
    others = iter(OTHERS)
    return [COLOURS.get(way) or next(others) for way in ways]


PANELS: dict[str, Callable[[Any, Section], None]] = {
    "submit": _submit,
    "delay": _delay,
    "bandwidth": _bandwidth,
}
PANELS |= {f"device_{name}": panel for name, panel in PANELS.items()}
