"""Every kind of workload by name: what a cell of the matrix or a command line may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from bench.common.plans import Workload
from bench.sim.workloads.agents import agents, no_reuse
from bench.sim.workloads.branching import compactions, forks, subagents
from bench.sim.workloads.claude_code import Replay, claude_code
from bench.sim.workloads.mixed import mixed
from bench.sim.workloads.mooncake import mooncake
from bench.sim.workloads.shape import Shape

_MADE_UP: dict[str, Callable[[Shape], Workload]] = {
    "agents": agents,
    "no_reuse": no_reuse,
    "forks": forks,
    "compactions": compactions,
    "subagents": subagents,
    "mixed": mixed,
}
_REPLAYED: dict[str, Callable[[Replay], Workload]] = {
    "claude_code": claude_code,
    "mooncake": mooncake,
}
NAMES = (*_MADE_UP, *_REPLAYED)


def build(name: str, parameters: Mapping[str, Any]) -> Workload:
    """Return the workload `name` with these fields of its Shape or Replay; arrivals lie within
    one second, to be stretched (load.py). Raises ValueError for an unknown name or field."""
    if name in _MADE_UP:
        return _MADE_UP[name](_check(Shape, name, parameters))
    if name in _REPLAYED:
        return _REPLAYED[name](_check(Replay, name, parameters))
    raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")


def _check(kind: type, name: str, parameters: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return kind(**parameters)
