"""Which arm plays which part in a report: ours, plain vLLM, and a hue for each rival's family."""

from __future__ import annotations

from collections.abc import Sequence

from bench.page import palette
from bench.page.palette import Look

FAMILIES = {  # an arm's name begins with its family's
    "continuum": "ours",
    "none": "stock",
    "lmcache-mp": "blue",
    "lmcache-v1": "sky",
    "simple": "green",
    "offloading": "purple",
}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """How each arm is drawn; arms of one family differ in dashes."""
    return palette.looks(arms, {arm: hue for arm in arms if (hue := _hue(arm))})


def _hue(arm: str) -> str:
    return next((hue for family, hue in FAMILIES.items() if arm.startswith(family)), "")
