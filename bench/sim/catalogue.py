"""Catalogue: every workload that a job can name, by the rate at which its programs arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.sim.plan import Workload
from bench.sim.workloads.eight_turns import eight_turns

WORKLOADS = {
    "eight_turns": "the published sweep's: 8 turns, 92 to 13,193 tokens, tools of 0.5 s, for 45 s",
}


def build(name: str, params: Mapping[str, Any], seed: int) -> Workload:
    """Lay out a workload. Raises ValueError or TypeError that says what it does not know."""
    if name != "eight_turns":
        raise ValueError(f"no workload {name!r}; there is {', '.join(WORKLOADS)}")
    return eight_turns(seed=seed, **params)
