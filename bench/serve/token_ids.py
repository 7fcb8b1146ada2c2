"""The token ids that a real server is sent for a plan.

They follow from (seed, program, turn) alone, so that any two arms send the same prompts,
thousands of programs cost no memory before they run, and no two turns share a block by accident.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from bench.common.plans import ProgramPlan

LOW, HIGH = 1000, 2000  # the first is drawn, the last is not: every model knows these, tiny ones
# too, and below them some have tokens that mean something


@dataclass(frozen=True)
class Tokens:
    """Token ids, drawn from the seed and who asks."""

    seed: int

    def of_turn(self, program: ProgramPlan, index: int) -> list[int]:
        """What is new in a turn's prompt. The first one's spans but the last are all programs'."""
        num_new = program.num_new(index)
        if index:
            return self._draw(f"{program.name}:{index}", num_new)
        head = self._draw("shared", num_new - program.turns[0].prompt[-1].length)
        return head + self._draw(program.name, num_new - len(head))

    def instead_of_answer(self, program: ProgramPlan, index: int) -> list[int]:
        """Ids for a server that does not say which ones it answered."""
        return self._draw(f"{program.name}:{index}:a", program.turns[index].answer.length)

    def _draw(self, what: str, num_tokens: int) -> list[int]:
        digest = hashlib.sha256(f"{self.seed}:{what}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        ids: list[int] = rng.integers(LOW, HIGH, num_tokens).tolist()
        return ids
