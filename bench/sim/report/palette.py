"""Which arm looks how: the same in every report, told apart by the colour-blind too.

The hues are Okabe and Ito's (2008), a shade darker on white and lighter on black. Ours is the one
warm, thick line; plain vLLM is grey; what no server can run is dashed. Plots are drawn in the
codes below, which the page replaces by CSS variables: so one drawing serves light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INK, SOFT, GRID, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
PLAIN = {INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper"}

OURS, STOCK, ORACLE = "adaptive", "stock", "infinite"
_FIXED = {OURS: "ours", STOCK: "stock", ORACLE: "oracle", "oracle": "oracle2"}
_HUES = ("blue", "green", "purple", "sky", "yellow", "brown")
_LIGHT = {
    "ours": "#d1480f",
    "stock": "#6e7681",
    "oracle": "#1f2328",
    "oracle2": "#1f2328",
    "blue": "#0066a8",
    "green": "#00855f",
    "purple": "#b4568c",
    "sky": "#2f9bd6",
    "yellow": "#b08b00",
    "brown": "#7a4b2a",
}
_DARK = {
    "ours": "#ff8247",
    "stock": "#8b949e",
    "oracle": "#e6edf3",
    "oracle2": "#e6edf3",
    "blue": "#4ea6e6",
    "green": "#2fc79a",
    "purple": "#e08bbb",
    "sky": "#8fd0f5",
    "yellow": "#e6c64c",
    "brown": "#c79a72",
}
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_MARKS = ("s", "^", "v", "D", "P", "X")
CODES = {hue: f"#{0x10 + i:02x}0d0e" for i, hue in enumerate(_LIGHT)}
TIERS = {"VRAM": CODES["blue"], "DRAM": CODES["sky"], "computed": CODES["stock"]}


@dataclass(frozen=True)
class Look:
    """How an arm is drawn; `code` is what stands for its colour until the page knows it."""

    code: str
    line: str | tuple[int, tuple[float, ...]] = "-"
    width: float = 1.5
    mark: str = "o"

    @property
    def variable(self) -> str:
        return VARIABLES[self.code]


VARIABLES = {**PLAIN, **{code: f"--{hue}" for hue, code in CODES.items()}}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """Each arm's look; of the arms without one of their own in the order in which they come."""
    found, number = {}, 0
    for arm in arms:
        if arm == OURS:
            found[arm] = Look(CODES["ours"], width=3.0)
        elif arm in _FIXED:
            is_real = arm == STOCK
            line = "-" if is_real else (0, (2, 2) if arm == ORACLE else (6, 2))
            found[arm] = Look(
                CODES[_FIXED[arm]], line, 2.0 if is_real else 1.3, "o" if is_real else ""
            )
        else:
            turn, hue = divmod(number, len(_HUES))
            found[arm] = Look(CODES[_HUES[hue]], _DASHES[turn % 3], 1.5, _MARKS[hue])
            number += 1
    return found


def css() -> str:
    """The variables' values, by what the reader's system prefers."""
    plain_light = "--ink:#1f2328;--soft:#59636e;--grid:#d8dee4;--paper:#ffffff;--wash:#f6f8fa;"
    plain_dark = "--ink:#e6edf3;--soft:#9198a1;--grid:#30363d;--paper:#0d1117;--wash:#151b23;"
    light = plain_light + "".join(f"--{hue}:{value};" for hue, value in _LIGHT.items())
    dark = plain_dark + "".join(f"--{hue}:{value};" for hue, value in _DARK.items())
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def themed(svg: str) -> str:
    """A drawing with variables in the place of codes."""
    for code, variable in VARIABLES.items():
        svg = svg.replace(code, f"var({variable})")
    return svg
