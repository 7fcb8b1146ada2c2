"""Kept: the chain of full blocks that a turn left, by which we see whether another continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_MARKS = 8  # of a chain
TO_ITS_END, FROM_ITS_PROMPT, UNKNOWN = 3, 2, 1  # how a turn continues a chain


@dataclass(frozen=True)
class Kept:
    """The chain of full blocks that a turn left: its number of tokens, and a few marks (index,
    block hash) along it. Only a few, because thousands of programs keep them. `prompt`: a mark at
    the end of the turn's prompt."""

    num_tokens: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()
    prompt: tuple[int, bytes] | None = None

    @classmethod
    def of(
        cls, hashes: Sequence[bytes], num_blocks: int, block_size: int, num_prompt: int = 0
    ) -> Kept:
        """Mark the first `num_blocks` of `hashes`; `num_prompt`: blocks of the prompt."""
        ends = {num_blocks * i // NUM_MARKS for i in range(1, NUM_MARKS + 1)} - {0}
        marks = tuple([(end - 1, hashes[end - 1]) for end in sorted(ends)])
        # The last block of a prompt may hold what its template puts before an answer alone.
        place = min(num_prompt - 2, num_blocks - 1)
        prompt = (place, hashes[place]) if place >= 0 else None
        return cls(num_blocks * block_size, marks, prompt)

    def continued(self, hashes: Sequence[bytes]) -> int:
        """How surely a turn with those hashes continues the chain: to its end; or from the end of
        its prompt on, because many clients send an answer back without its thinking; or nobody
        knows, as the chain has no block to tell by; else 0."""
        if not self.marks:
            return UNKNOWN
        if _has(hashes, self.marks[-1]):
            return TO_ITS_END
        is_from_prompt = self.prompt is not None and _has(hashes, self.prompt)
        return FROM_ITS_PROMPT if is_from_prompt else 0

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain a prompt begins with. The result is up to an eighth too
        low."""
        return max((mark[0] + 1 for mark in self.marks if _has(hashes, mark)), default=0)

    def goes_on_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether a turn with those hashes continues the chain at least to its middle. Not to its
        end, because the next prompt may repeat the answer without the thinking in it."""
        return 2 * self.shared(hashes) > self.marks[-1][0] if self.marks else False


def _has(hashes: Sequence[bytes], mark: tuple[int, bytes]) -> bool:
    place, block_hash = mark
    return place < len(hashes) and hashes[place] == block_hash
