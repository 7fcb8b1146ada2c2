"""Kept: the chain of full blocks that a turn left, by which we see whether another continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from continuum_connector.programs.lineage import PIECE, as_bytes, has_block, pieces_of

NUM_MARKS = 8  # of a chain
TO_ITS_END, FROM_ITS_PROMPT, UNKNOWN = 3, 2, 1  # how a turn continues a chain
NEAR = 2048  # tokens around the end of a prompt in which the next one may repeat its answer
MIN_ANSWER = 4  # tokens by which a short answer is known again; its last may be left out


@dataclass(frozen=True)
class Kept:
    """The chain of full blocks that a turn left: its number of tokens, and a few marks (index,
    block hash) along it. Only a few, because thousands of programs keep them. `prompt`: a mark at
    the end of the turn's prompt, which has `num_prompt_tokens`; `first`: its first block's hash.
    `answer`: pieces of what followed."""

    num_tokens: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()
    prompt: tuple[int, bytes] | None = None
    num_prompt_tokens: int = 0
    first: bytes = b""
    answer: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        hashes: Sequence[bytes],
        num_blocks: int,
        block_size: int,
        num_prompt_tokens: int = 0,
        answer: Sequence[int] = (),
    ) -> Kept:
        """Mark the first `num_blocks` of `hashes`; `answer`: the output's tokens."""
        ends = {num_blocks * i // NUM_MARKS for i in range(1, NUM_MARKS + 1)} - {0}
        marks = tuple([(end - 1, hashes[end - 1]) for end in sorted(ends)])
        # The last block of a prompt may hold what its template puts before an answer alone.
        place = min(num_prompt_tokens // block_size - 2, num_blocks - 1)
        prompt = (place, hashes[place]) if place >= 0 else None
        first = hashes[0] if num_blocks else b""
        kept = num_blocks * block_size
        return cls(kept, marks, prompt, num_prompt_tokens, first, _pieces(answer))

    def continued(self, hashes: Sequence[bytes]) -> int:
        """How surely a turn with those hashes continues the chain: to its end; or from the end of
        its prompt on, because many clients send an answer back without its thinking; or nobody
        knows, as the chain has no block to tell by; else 0."""
        if not self.marks:
            return UNKNOWN
        if has_block(hashes, *self.marks[-1]):
            return TO_ITS_END
        is_from_prompt = self.prompt is not None and has_block(hashes, *self.prompt)
        return FROM_ITS_PROMPT if is_from_prompt else 0

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain a prompt begins with. The result is up to an eighth too
        low."""
        return next((mark[0] + 1 for mark in reversed(self.marks) if has_block(hashes, *mark)), 0)

    def goes_on_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether a turn with those hashes continues the chain at least to its middle. Not to its
        end, because the next prompt may repeat the answer without the thinking in it."""
        return 2 * self.shared(hashes) > self.marks[-1][0] if self.marks else False

    def is_told_again(
        self, hashes: Sequence[bytes], num_tokens: int, tokens: Sequence[int] | None
    ) -> bool:
        """Whether a prompt that does not continue the chain goes on with its conversation: it is
        longer, and repeats the answer where that must be, or, if nobody can tell, begins alike.
        `tokens`: the prompt's, if they are known."""
        if num_tokens <= self.num_prompt_tokens or not self.marks:
            return False
        if tokens is None or not self.answer:
            return has_block(hashes, 0, self.first)
        near = slice(max(0, self.num_prompt_tokens - NEAR), self.num_prompt_tokens + NEAR)
        text = as_bytes(tokens[near])
        return any(piece in text for piece in self.answer)


def _pieces(answer: Sequence[int]) -> tuple[bytes, ...]:
    is_short = MIN_ANSWER < len(answer) < PIECE
    return (as_bytes(answer[:-1]),) if is_short else pieces_of(answer)
