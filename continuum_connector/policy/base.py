"""The interface every retention policy implements, and the words of its answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from continuum_connector.programs.program import Hints


class After(enum.Enum):
    """What is left of a pinned turn when its pin ends."""

    STORE = "store"  # its blocks are in DRAM by then: the copy starts with the pin
    DROP = "drop"  # nothing: the blocks go back to the pool


@dataclass(frozen=True)
class Pin:
    """Keep the turn's blocks in VRAM for `ttl_s` seconds.

    `value` ranks pins under pressure, lowest first; policies that cannot price a pin leave
    it 0 and the program that arrived last gives way first (Continuum, section 5.2).
    """

    ttl_s: float
    then: After = After.DROP
    value: float = 0.0


@dataclass(frozen=True)
class Offload:
    """Store the turn's blocks to DRAM, then free them."""


@dataclass(frozen=True)
class Free:
    """Let go of the turn's blocks now, as stock vLLM does."""


Decision = Pin | Offload | Free


@dataclass(frozen=True)
class FinishedTurn:
    """What is known of a turn at the moment it ends.

    `num_tokens` counts prompt and output; `num_blocks` the hashed blocks over all KV groups,
    which are what can be kept. `aborted` means the client went away, not that it got a stop string.
    """

    program: str
    turn: int
    num_tokens: int
    num_blocks: int
    hints: Hints
    aborted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The world at decision time. Blocks are VRAM blocks; `now` is monotonic seconds."""

    now: float
    num_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    num_waiting: int
    has_tier: bool


class RetentionPolicy(Protocol):
    """Decides what becomes of a finished turn."""

    name: str

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> tuple[Decision, str]:
        """Return the decision and, in a few words, why."""
        ...
