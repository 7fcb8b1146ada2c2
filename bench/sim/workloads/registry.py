"""Every workload that a cell of the matrix or a command line may ask for, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from bench.common.plans import Workload
from bench.sim.load import stretched
from bench.sim.workloads.made_up import (
    agents,
    api_calls,
    compactions,
    eight_turns,
    forks,
    mixed,
    no_reuse,
    subagents,
)
from bench.sim.workloads.mooncake import RECORDED, Recording, mooncake, recorded
from bench.sim.workloads.recorded import Replay, Slots, claude_code, swe
from bench.sim.workloads.shape import Shape

EIGHT_TURNS = "eight_turns"
_LAID_OUT: dict[str, tuple[type, Callable[[Any], Workload], str]] = {
    "agents": (Shape, agents, "made up: contexts that grow over 8 turns, a tool between two"),
    "no_reuse": (Shape, no_reuse, "made up: single requests that have nothing in common"),
    "forks": (Shape, forks, "made up: programs that share a long beginning"),
    "compactions": (Shape, compactions, "made up: programs that summarise themselves"),
    "subagents": (Shape, subagents, "made up: programs that send out others and wait for them"),
    "api_calls": (Shape, api_calls, "made up: single requests that share 200 system prompts"),
    "mixed": (Shape, mixed, "made up: agents, people and single requests on one server"),
    "claude_code": (
        *(Replay, claude_code),
        "recorded: coding sessions with their sub-agents, contexts scaled to an eighth",
    ),
    "mooncake": (Replay, mooncake, "recorded: an hour of a chat service"),
    "swe": (
        *(Slots, swe),
        "recorded: SWE-smith agents, whose pauses are drawn; slots=14: so many at a time",
    ),
}
NAMES = tuple(_LAID_OUT)
WORKLOADS = {
    EIGHT_TURNS: "the published sweep's: 8 turns, 92 to 13,193 tokens, tools of 0.5 s, for 45 s",
    **{name: what for name, (_, _, what) in _LAID_OUT.items()},
}


def build(name: str, parameters: Mapping[str, Any]) -> Workload:
    """Return the workload `name` with these fields of its Shape or Replay; arrivals lie within
    one second, to be stretched (load.py). Raises ValueError for an unknown name or field."""
    known_names = {**_LAID_OUT, RECORDED: (Recording, recorded, "")}  # --workload FILE
    if name not in known_names:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    kind, lay_out, _ = known_names[name]
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return lay_out(kind(**parameters))


def at_rate(name: str, params: Mapping[str, Any], seed: int) -> Workload:
    """The same for a job: `rate` is programs per second, the rest are its own parameters.

    Raises ValueError or TypeError that names what it does not know.
    """
    if name == EIGHT_TURNS:
        return eight_turns(seed=seed, **params)
    own = {key: value for key, value in params.items() if key != "rate"}
    workload = build(name, {**own, "seed": seed})
    heads = sum(plan.after is None for plan in workload.programs)
    return stretched(workload, heads / params["rate"])
