"""The loads that can be named: what a program is, how many there are, how they arrive.

sweep                the 8-turn agent of the four-GPU LMCache sweep, to the token
pressure             6 programs x 4 turns, one request at a time: which KV survives in DRAM?
claude-code:FILE     recorded coding sessions (`replay.py`)
FILE.toml            your own (`own.py`)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.serve.plans import ProgramPlan, TurnPlan
from continuum_connector.tools.cli.ending import ToldError


class WorkloadError(ToldError):
    """A workload that cannot be read; the message says what to write."""


@dataclass(frozen=True)
class Defaults:
    """How a workload is meant to be driven, where the command line does not say."""

    arrivals: str
    duration_s: float = 45.0
    programs: int = 0  # at most; 0: as many as arrive


class Workload(Protocol):
    """Programs by number: any number of times the same, in any order."""

    @property
    def name(self) -> str:
        """As it is called in results."""

    @property
    def defaults(self) -> Defaults:
        """How it is meant to be driven."""

    @property
    def size(self) -> int | None:
        """How many programs there are; None: as many as you ask for."""

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Draw program `number`."""


@dataclass(frozen=True)
class Uniform:
    """Every program is the same but for its token ids."""

    name: str
    prefix: str
    turns: tuple[TurnPlan, ...]
    shared_tokens: int
    defaults: Defaults
    size: int | None = None

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Draw program `number`; sizes and pauses know no chance."""
        return ProgramPlan(f"{self.prefix}{number:04d}", self.turns, self.shared_tokens)


# Of the sweep: turn 1 has 92 tokens, 80 of them in common; what each tool call returned, as it
# was measured (the targets were 1640, 1510, ...); 20 tokens answered; 0.5 s of tool time.
# Prompts: 92, 1840, 3449, 6025, 7454, 10299, 12333, 13193 tokens.
SWEEP_TOOL_TOKENS = (1728, 1589, 2556, 1409, 2825, 2014, 840)
SWEEP = Uniform(
    "sweep",
    "job_",
    (TurnPlan(92, 20), *(TurnPlan(tokens, 20, 0.5) for tokens in SWEEP_TOOL_TOKENS)),
    shared_tokens=80,
    defaults=Defaults("poisson:1"),
)

# One request at a time, so that what is kept depends on decisions alone: round robin over more
# contexts than fit is the worst case of LRU. Prompts: 700, 908, 1116, 1324 tokens.
PRESSURE = Uniform(
    "pressure",
    "program_",
    (TurnPlan(700, 8), *(TurnPlan(200, 8) for _ in range(3))),
    shared_tokens=0,
    defaults=Defaults("turns", programs=6),
    size=6,
)
NAMED: dict[str, Workload] = {each.name: each for each in (SWEEP, PRESSURE)}


def find_workload(text: str) -> Workload:
    """The workload that `text` names, or whose file it is."""
    from bench.serve import own, replay

    if text in NAMED:
        return NAMED[text]
    kind, _, path = text.partition(":")
    if kind == "claude-code" and path:
        return replay.read(path)
    if text.endswith(".toml"):
        return own.read(Path(text))
    raise WorkloadError(
        f"--workload {text}: not known; there is {', '.join(NAMED)}, claude-code:FILE "
        "and your own FILE.toml"
    )
