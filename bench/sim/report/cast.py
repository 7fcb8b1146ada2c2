"""Which of the lab's arms plays which part in a report."""

from __future__ import annotations

from collections.abc import Sequence

from bench.page import palette
from bench.page.palette import Look

OURS = "adaptive"
HUES = {OURS: "ours", "stock": "stock", "infinite": "oracle", "oracle": "oracle2"}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """How each arm is drawn."""
    return palette.looks(arms, HUES)
