"""Turn: one request while vLLM knows it."""

from __future__ import annotations

from dataclasses import dataclass

from continuum_connector.programs.program import Identity, Program


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
