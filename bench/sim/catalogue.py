"""Catalogue: every workload that a job can name, by the rate at which its programs arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.plans import Workload
from bench.sim.load import stretched
from bench.sim.workloads import registry
from bench.sim.workloads.eight_turns import eight_turns

EIGHT_TURNS = "eight_turns"
WORKLOADS = {
    EIGHT_TURNS: "the published sweep's: 8 turns, 92 to 13,193 tokens, tools of 0.5 s, for 45 s",
    "agents": "made up: contexts that grow over 8 turns, a tool between two",
    "no_reuse": "made up: single requests that have nothing in common",
    "forks": "made up: programs that share a long beginning",
    "compactions": "made up: programs that summarise themselves",
    "subagents": "made up: programs that send out others and wait for them",
    "mixed": "made up: agents, people and single requests on one server",
    "claude_code": "recorded: coding sessions with their sub-agents, contexts scaled to an eighth",
    "mooncake": "recorded: an hour of a chat service",
}


def build(name: str, params: Mapping[str, Any], seed: int) -> Workload:
    """Lay out a workload; `rate` is programs per second, the rest are its own parameters.

    Raises ValueError or TypeError that names what it does not know.
    """
    if name == EIGHT_TURNS:
        return eight_turns(seed=seed, **params)
    own = {key: value for key, value in params.items() if key != "rate"}
    workload = registry.build(name, {**own, "seed": seed})
    heads = sum(plan.after is None for plan in workload.programs)
    return stretched(workload, heads / params["rate"])
