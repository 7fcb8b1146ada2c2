"""Arm: what is compared, wherever it runs, who it is to us, and how it is drawn.

How one is set up is said where it runs: in the lab (sim/arms/), on a real server (serve/arms.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from bench.page import palette
from bench.page.palette import Look

OURS, STOCK = "adaptive", "stock"  # in the lab: what is judged, and plain vLLM

FAMILIES = {  # an arm's name is that of its family, or begins with it
    "continuum:": "ours",
    "continuum-disk:": "ours",
    "none": "stock",
    "stock": "stock",
    "lmcache-mp": "blue",
    "lmcache": "sky",
    "simple": "green",
    "offloading": "purple",
    "infinite": "oracle",
    "oracle": "oracle2",
}


class Role(enum.Enum):
    """Who an arm is to us."""

    OURS = "ours"  # what is judged
    RELATED = "related"  # another policy on our connector: judged against, but no rival
    RIVAL = "rival"  # a server without our connector could run it, or the paper's did
    ORACLE = "oracle"  # knows the future, or has room for everything: shown, never the best


@dataclass(frozen=True)
class Arm:
    """`name`: as it is asked for and written into results; `title`: in a few words."""

    name: str
    title: str
    _: KW_ONLY
    role: Role = Role.RIVAL


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """How each arm is drawn, the same in every report; arms of one family differ in dashes."""
    return palette.looks(arms, {arm: hue for arm in arms if (hue := _hue(arm))})


def _hue(arm: str) -> str:
    if arm == OURS:  # and no other: what it is without one of its parts is another line
        return "ours"
    return next((hue for family, hue in FAMILIES.items() if arm.startswith(family)), "")
