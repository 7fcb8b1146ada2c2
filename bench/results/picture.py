"""The front page's picture: a prompt while a tool runs, and how much sooner jobs end.

The upper half is a drawing; the bars below are the means of bench/results/gpu.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from bench.results.kept import Cell, Kept

PATH = Path(__file__).resolve().parents[2] / "docs" / "images" / "agents.svg"

WIDTH, LEFT, RIGHT = 760, 176, 740  # of all; where bars begin and may end
AGAIN, NEW, ANSWER, KEPT = "#c8502d", "#2f6fb0", "#9dbfe0", "#dfeee0"
INK, FAINT = "#1f2328", "#59636e"
ARMS = {  # of the table -> as the picture says it, and its colour
    "`none`": ("stock vLLM", "#8b949e"),
    "`simple`": ("vLLM's own offloading", "#c3a35b"),
    "`continuum`": ("with ContinuumConnector", NEW),
}
# An agent of three turns: what each reads anew, in tenths of a second of the drawing.
TURNS, DECODE, TOOL = (10, 4, 4), 4, 7


def picture(gpu: Kept) -> str:
    """The picture as SVG."""
    drawn = [*_story()]
    height, bars = _bars(gpu.rows, 192)
    body = "\n".join([*drawn, *bars])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13">\n'
        f"<title>{escape(summary(gpu))}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def summary(gpu: Kept) -> str:
    """The picture in words, for whoever cannot see it."""
    runs = "; ".join(
        f"{load}: " + ", ".join(f"{ARMS[arm][0]} {seconds:.0f} s" for arm, seconds in arms)
        for load, arms in _runs(gpu.rows)
    )
    return (
        "Stock vLLM computes an agent's whole prompt again after each tool call; with "
        "ContinuumConnector only what is new is computed. Mean job completion time on an H200: "
        f"{runs}."
    )


# --- the drawing ------------------------------------------------------------------------
def _story() -> Iterator[str]:
    yield _text(20, 30, "One agent, three turns, on a GPU that others need as well", weight="bold")
    legend = (
        ("new text computed", NEW),
        ("computed again", AGAIN),
        ("answer", ANSWER),
        ("kept while the tool runs", KEPT),
    )
    x = 20
    for said, colour in legend:
        yield _rect(x, 42, 12, 12, colour)
        yield _text(x + 17, 53, said, FAINT)
        x += 34 + 7 * len(said)
    yield from _row(72, "stock vLLM", is_kept=False)
    yield from _row(116, "with ContinuumConnector", is_kept=True)


def _row(y: int, name: str, *, is_kept: bool) -> Iterator[str]:
    """The agent's time from left to right."""
    yield _text(LEFT - 10, y + 23, name, anchor="end")
    x, had, scale = LEFT, 0, (RIGHT - LEFT) / (sum(_spans(is_kept=False)) + 5)
    for turn, new in enumerate(TURNS):
        if turn:
            width = TOOL * scale
            if is_kept:
                yield _rect(x, y + 4, width, 28, KEPT)
            yield _text(x + width / 2, y + 22, "tool runs", FAINT, "middle", 11)
            x += width
        pieces = [] if is_kept or not had else [(had, AGAIN)]
        for tenths, colour in (*pieces, (new, NEW), (DECODE, ANSWER)):
            yield _rect(x, y, tenths * scale, 36, colour)
            x += tenths * scale
        had += new + DECODE
    yield _text(x + 6, y + 23, "done", INK, weight="bold")


def _spans(*, is_kept: bool) -> list[int]:
    again = [0 if is_kept else sum(TURNS[:i]) + DECODE * i for i in range(len(TURNS))]
    return [*again, *TURNS, DECODE * len(TURNS), TOOL * (len(TURNS) - 1)]


# --- the bars ---------------------------------------------------------------------------
def _bars(rows: Sequence[Sequence[Cell]], top: int) -> tuple[int, list[str]]:
    """Where they end, and the bars: a group per load, the heaviest first."""
    runs = _runs(rows)
    most = max(seconds for _, arms in runs for _, seconds in arms)
    lines = [
        _text(20, top, "Mean time until an agent's job is done, on an H200", weight="bold"),
        _text(
            20, top + 18, "8 turns each, Llama-3.1-8B's shape, room for 12 contexts in VRAM", FAINT
        ),
    ]
    y = top + 34
    for load, arms in runs:
        lines.append(_text(LEFT - 10, y + 16 * len(arms) / 2 + 4, load, anchor="end"))
        for arm, seconds in arms:
            said, colour = ARMS[arm]
            width = (RIGHT - LEFT - 190) * seconds / most
            lines.append(_rect(LEFT, y, width, 13, colour))
            lines.append(
                _text(LEFT + width + 6, y + 11, f"{seconds:.0f} s  {said}", FAINT, size=12)
            )
            y += 16
        y += 8
    return y + 6, lines


def _runs(rows: Sequence[Sequence[Cell]]) -> list[tuple[str, list[tuple[str, float]]]]:
    """By load: each arm's mean JCT, the slowest load first."""
    found = []
    for (rate, seed), group in groupby(rows, lambda row: (row[0], row[1])):
        arms = {str(row[2]): float(row[3] or 0.0) for row in group}
        found.append((f"{rate} agents/s, seed {seed}", [(a, arms[a]) for a in ARMS if a in arms]))
    return sorted(found, key=lambda run: -max(seconds for _, seconds in run[1]))


# --- SVG --------------------------------------------------------------------------------
def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _text(
    x: float,
    y: float,
    said: str,
    colour: str = INK,
    anchor: str = "start",
    size: int = 13,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-size="{size}" font-weight="{weight}">{escape(said)}</text>'
    )
