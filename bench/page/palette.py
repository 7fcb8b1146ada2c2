"""How a line looks: the same in every report, told apart by the colour-blind too.

The hues are Okabe and Ito's (2008), a shade darker on white and lighter on black. Ours is the one
warm, thick line; plain vLLM is grey; what no server can run is dashed. Plots are drawn in the
codes below, which the page replaces by CSS variables: so one drawing serves light and dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

INK, SOFT, GRID, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
PLAIN = {INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper"}

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
CODES = {hue: f"#{0x10 + i:02x}0d0e" for i, hue in enumerate(_LIGHT)}
TIERS = {"VRAM": CODES["blue"], "DRAM": CODES["sky"], "computed": CODES["stock"]}
FADED = 0.45  # opacity of what was computed, among tiers


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

    @property
    def is_ours(self) -> bool:
        return self.code == CODES["ours"]

    @property
    def is_oracle(self) -> bool:
        """Whether no server can run it: it is shown, and never the best."""
        return self.code in (CODES["oracle"], CODES["oracle2"])


VARIABLES = {**PLAIN, **{code: f"--{hue}" for hue, code in CODES.items()}}
_LOOKS = {
    "ours": Look(CODES["ours"], width=3.0),
    "stock": Look(CODES["stock"], width=2.0),
    "oracle": Look(CODES["oracle"], (0, (2, 2)), 1.3, ""),
    "oracle2": Look(CODES["oracle2"], (0, (6, 2)), 1.3, ""),
    **{hue: Look(CODES[hue], mark=mark) for hue, mark in zip(_HUES, "s^vDPX", strict=True)},
}


def looks(arms: Sequence[str], hues: Mapping[str, str]) -> dict[str, Look]:
    """Each arm's look. `hues`: of the arms that have one of their own.

    The others get what is left, in the order in which they come; arms of one hue differ in dashes.
    """
    spare = cycle([hue for hue in _HUES if hue not in hues.values()] or _HUES)
    found, taken = {}, Counter[str]()
    for arm in arms:
        hue = hues.get(arm) or next(spare)
        look = _LOOKS[hue]
        if taken[hue]:
            look = replace(look, line=_DASHES[taken[hue] % 3], width=min(look.width, 1.5))
        found[arm] = look
        taken[hue] += 1
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
