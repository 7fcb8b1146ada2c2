"""Arm: what is compared, wherever it runs, and who it is to us.

How one is set up is said where it runs: in the lab (sim/arms/), on a real server (serve/arms.py).
"""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, dataclass

OURS, STOCK = "adaptive", "stock"  # in the lab: what is judged, and plain vLLM


class Role(enum.Enum):
    """Who an arm is to us."""

    OURS = "ours"  # what is judged
    RELATED = "related"  # another policy on our connector: judged against, but no rival
    RIVAL = "rival"  # a server without our connector could run it, or the paper's did
    ORACLE = "oracle"  # has room for everything: shown, never the best


@dataclass(frozen=True)
class Arm:
    """`name`: as it is asked for and written into results; `title`: in a few words."""

    name: str
    title: str
    _: KW_ONLY
    role: Role = Role.RIVAL


def is_ours(arm: str) -> bool:
    """Whether a report makes it stand out, and no other: what `adaptive` is without one of its
    parts is another arm."""
    return arm == OURS or arm.startswith(("continuum:", "continuum-disk:"))
