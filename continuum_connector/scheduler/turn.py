"""Turn: one request while vLLM knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from continuum_connector.programs.program import Identity, Program


class TurnEnd(enum.Enum):
    """How vLLM says that a request ended."""

    STOP = "stop"  # it said all it had to say
    LENGTH = "length"  # at a token limit
    ABORTED = "aborted"  # by the API server: a stop string, or the client went away


@dataclass(eq=False)
class Turn:
    """`number` counts the program's turns from 1; `arrival` is monotonic seconds.

    `vram_tokens` and `dram_tokens` are what was found for it when it was first admitted.
    """

    program: Program
    identity: Identity
    number: int
    arrival: float
    is_admitted: bool = False
    is_preempted: bool = False  # and not admitted again yet
    vram_tokens: int = 0
    dram_tokens: int = 0
