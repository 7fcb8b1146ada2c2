"""Your own workload, as a TOML file.

    name = "reviewers"
    arrivals = "poisson:2"         # or closed:64, turns
    duration_s = 60
    programs = 0                   # at most; 0: as many as arrive
    shared_tokens = 200            # of the first prompt: the same for all programs
    turns = [4, 9]                 # a number, or a range drawn from evenly
    first_tokens = [500, 900]      # the first prompt, the shared tokens among them
    tool_tokens = [250, 450]       # what each tool call adds to the context
    answer_tokens = [16, 40]
    pause_s = { median = 0.9, sigma = 0.4, most = 4.0 }    # lognormal; or a number, or a range

Or every turn as it is to be, the same for each program:

    name = "three turns"
    [[turn]]
    new_tokens = 500
    answer_tokens = 20
    [[turn]]
    new_tokens = 300
    answer_tokens = 20
    pause_s = 1.5

Either way, people's questions may come among them:

    [chat]
    every = 4                      # program 3, 7, 11 ... asks once and is gone
    tokens = 100
    answer_tokens = 16
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from bench.cli import regular
from bench.common.plans import Added, ProgramPlan, grown
from bench.serve.programs import Defaults, WorkloadError

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
CountRange = int | tuple[int, int]  # bounds are checked below: msgspec 0.22 crashes on them here


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most near `median`, few far above it; never more than `most`."""

    median: Seconds
    sigma: Seconds
    most: Seconds = math.inf


class OneTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the turns, where they are written out."""

    new_tokens: Count
    answer_tokens: Count
    pause_s: Seconds = 0.0


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Programs of one short turn among the others."""

    every: Count
    tokens: Count
    answer_tokens: Count


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What such a file may hold."""

    name: str
    arrivals: str = "poisson:1"
    duration_s: Seconds = 45.0
    programs: Annotated[int, msgspec.Meta(ge=0)] = 0
    shared_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    turns: CountRange = 6
    first_tokens: CountRange = (500, 900)
    tool_tokens: CountRange = (250, 450)
    answer_tokens: CountRange = (16, 40)
    pause_s: float | tuple[float, float] | Lognormal = 1.0
    turn: list[OneTurn] = []
    chat: Chat | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "first_tokens", "tool_tokens", "answer_tokens", "pause_s"):
            value = getattr(self, name)
            if isinstance(value, Lognormal):
                continue
            low, high = value if isinstance(value, tuple) else (value, value)
            if not (0 if name == "pause_s" else 1) <= low <= high:
                raise ValueError(f"{name} = {value}: write a number or [least, most]")


@dataclass(frozen=True)
class Own:
    """A workload read from a file."""

    file: File
    size: int | None = None

    @property
    def name(self) -> str:
        """What the file calls it."""
        return self.file.name

    @cached_property
    def defaults(self) -> Defaults:
        """What the file says."""
        return Defaults(self.file.arrivals, self.file.duration_s, self.file.programs)

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Draw program `number`."""
        file, rng = self.file, random.Random(f"{seed}:{number}")
        if (chat := file.chat) and number % chat.every == chat.every - 1:
            return grown(f"chat_{number:04d}", [Added(chat.tokens, chat.answer_tokens, 0.0)], 0)
        if file.turn:
            turns = [Added(t.new_tokens, t.answer_tokens, t.pause_s) for t in file.turn]
        else:
            turns = [self._turn(rng, index) for index in range(_count(rng, file.turns))]
        return grown(f"program_{number:04d}", turns, file.shared_tokens)

    def _turn(self, rng: random.Random, index: int) -> Added:
        file = self.file
        return Added(
            num_new=_count(rng, file.tool_tokens if index else file.first_tokens),
            num_answer=_count(rng, file.answer_tokens),
            gap_s=_pause(rng, file.pause_s) if index else 0.0,
        )


def read(path: Path) -> Own:
    """Read the file; WorkloadError with its place in the file if it is wrong."""
    regular(path, "--workload ", WorkloadError)
    try:
        return Own(msgspec.toml.decode(path.read_bytes(), type=File))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkloadError(f"--workload {path}: {error}") from None
    except ImportError:
        raise WorkloadError("--workload: reading TOML on Python 3.10 needs `tomli`") from None


def _count(rng: random.Random, value: CountRange) -> int:
    return rng.randint(*value) if isinstance(value, tuple) else value


def _pause(rng: random.Random, value: float | tuple[float, float] | Lognormal) -> float:
    if isinstance(value, Lognormal):
        return min(rng.lognormvariate(0.0, value.sigma) * value.median, value.most)
    return rng.uniform(*value) if isinstance(value, tuple) else value
