"""Where the programs of a load come from: by number, any number of times the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.common.plans import Added, ProgramPlan, grown
from continuum_connector.errors import ToldError


class WorkloadError(ToldError):
    """A workload that cannot be read; the message says what to write."""


@dataclass(frozen=True)
class Defaults:
    """How a workload is meant to be driven, where the command line does not say."""

    arrivals: str
    duration_s: float = 45.0
    programs: int = 0  # at most; 0: as many as arrive


class Source(Protocol):
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
    turns: tuple[Added, ...]
    shared_tokens: int
    defaults: Defaults
    size: int | None = None

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Draw program `number`; sizes and pauses know no chance."""
        return grown(f"{self.prefix}{number:04d}", self.turns, self.shared_tokens)
