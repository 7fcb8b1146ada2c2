"""Kept and Divergence: whether a prompt continues what a turn left, and, if not, where it differs.

Kept is the chain of full blocks that a turn left. A prompt diverges if it goes on with its
program's conversation, but behind text that has changed: a clock in the system prompt, tools in
another order. It repeats the last answer, yet from some early block on no hash is as it was, so
nothing that was kept behind it is found. An edit of the context does that once; these clients do it
in every turn, and then keeping is for nobody. All that is needed to see that they continue again
are the marks of the chains that their turns left.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from continuum_connector.programs.lineage import PIECE, as_bytes, has_block, pieces_of

NUM_MARKS = 8  # of a chain
TO_ITS_END, FROM_ITS_PROMPT, UNKNOWN = 3, 2, 1  # how a turn continues a chain
NEAR = 2048  # tokens around the end of a prompt in which the next one may repeat its answer
TAIL = 24, 8  # from its end: tokens by which a prompt's end is known; the last are its template's
MIN_ANSWER = 4  # tokens by which a short answer is known again; its last may be left out


class PromptText:
    """The `tokens` of a turn's prompt, None if they are not known, in which its program's answers
    are looked for."""

    def __init__(self, tokens: Sequence[int] | None) -> None:
        self.tokens = tokens
        self._parts: dict[int, bytes] = {}

    def goes_on_from(self, kept: Kept) -> bool:
        """Whether it has the end of that prompt where it was, or a piece of the answer, or nobody
        can tell."""
        if self.tokens is None:
            return True
        return _tail(self.tokens, kept.num_prompt_tokens) == kept.tail or self.repeats(kept)

    def repeats(self, kept: Kept) -> bool:
        """Whether it has a piece of that answer where that must be, or nobody can tell."""
        if self.tokens is None or not kept.answer:
            return True
        number = kept.num_prompt_tokens // NEAR
        part = self._parts.get(number)
        if part is None:  # as wide as another chain's of about that length needs it, too
            near = slice(max(0, number - 1) * NEAR, (number + 2) * NEAR)
            part = self._parts[number] = as_bytes(self.tokens[near])
        return any(piece in part for piece in kept.answer)


@dataclass(frozen=True)
class Kept:
    """The chain of full blocks that a turn left: its number of tokens, and a few marks (index,
    block hash) along it. Only a few, because thousands of programs keep them. `prompt`: a mark at
    the end of the turn's prompt, which has `num_prompt_tokens`; `first`: its first block's hash.
    `answer`: pieces of what followed; `tail`: the last tokens before it that are no template's.
    `num_common`: its first blocks that another conversation begins with as well, as far as we know:
    what the first turn of this one found, others had computed."""

    num_tokens: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()
    prompt: tuple[int, bytes] | None = None
    num_prompt_tokens: int = 0
    first: bytes = b""
    answer: tuple[bytes, ...] = ()
    num_common: int = 0
    tail: bytes = b""

    @classmethod
    def of(cls, request: Any, num_blocks: int, block_size: int, num_common: int = 0) -> Kept:
        """Mark the first `num_blocks` of a turn's `request`."""
        hashes, tokens = request.block_hashes, request.prompt_token_ids
        num_prompt_tokens = request.num_prompt_tokens
        ends = {num_blocks * i // NUM_MARKS for i in range(1, NUM_MARKS + 1)} - {0}
        marks = tuple([(end - 1, hashes[end - 1]) for end in sorted(ends)])
        # The last block of a prompt may hold what its template puts before an answer alone.
        place = min(num_prompt_tokens // block_size - 2, num_blocks - 1)
        prompt = (place, hashes[place]) if place >= 0 else None
        first = hashes[0] if num_blocks else b""
        kept = num_blocks * block_size
        tail = b"" if tokens is None else _tail(tokens, num_prompt_tokens)
        pieces = _pieces(request.output_token_ids)
        return cls(kept, marks, prompt, num_prompt_tokens, first, pieces, num_common, tail)

    def continued(self, hashes: Sequence[bytes], text: PromptText | None = None) -> int:
        """How surely a turn with those hashes continues the chain: to its end; or from the end of
        its prompt on, because many clients send an answer back without its thinking; or nobody
        knows, as the chain has no block to tell by; else 0. `text`: the prompt's, because a short
        question after a system prompt that others have, too, fills no block."""
        if not self.marks:
            return UNKNOWN
        if has_block(hashes, *self.marks[-1]):
            return TO_ITS_END
        if self.prompt is None or not has_block(hashes, *self.prompt):
            return 0
        is_sure = self.is_prompt_own or text is None or text.goes_on_from(self)
        return FROM_ITS_PROMPT if is_sure else 0

    @property
    def is_prompt_own(self) -> bool:
        """Whether only what continues the chain has the end of its prompt."""
        return self.prompt is not None and self.prompt[0] >= self.num_common

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain a prompt begins with. The result is up to an eighth too
        low."""
        return next((mark[0] + 1 for mark in reversed(self.marks) if has_block(hashes, *mark)), 0)

    def goes_on_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether a turn with those hashes continues the chain at least to its middle. Not to its
        end, because the next prompt may repeat the answer without the thinking in it."""
        return 2 * self.shared(hashes) > self.marks[-1][0] if self.marks else False

    def is_edited_in(self, hashes: Sequence[bytes], text: PromptText) -> bool:
        """Whether a prompt that does not continue the chain begins alike, and surely repeats the
        answer: its conversation goes on without some of what was there, as its client has cleared
        or condensed it."""
        begins = has_block(hashes, 0, self.first)
        return begins and bool(self.answer) and text.tokens is not None and text.repeats(self)

    def is_told_again(self, hashes: Sequence[bytes], num_tokens: int, text: PromptText) -> bool:
        """Whether a prompt that does not continue the chain goes on with its conversation: it is
        longer, and repeats the answer where that must be, or, if nobody can tell, begins alike."""
        if num_tokens <= self.num_prompt_tokens or not self.marks:
            return False
        if text.tokens is None or not self.answer:
            return has_block(hashes, 0, self.first)
        return text.repeats(self)


def _tail(tokens: Sequence[int], end: int) -> bytes:
    first, last = TAIL
    return as_bytes(tokens[max(0, end - first) : max(0, end - last)])


def _pieces(answer: Sequence[int]) -> tuple[bytes, ...]:
    is_short = MIN_ANSWER < len(answer) < PIECE
    return (as_bytes(answer[:-1]),) if is_short else pieces_of(answer)


# --- where it differs ------------------------------------------------------------------
TOLERATED = 1  # such turns in a row
MIN_HEAD = 8  # a program whose prompts share an eighth of them is paid for as ever
MAX_CHAINS = 8  # of a program, the newest, that a prompt is compared with
MAX_PARTS, DIGITS = 32, 8  # of a request, whose digests the middleware sends
MIN_MESSAGES = 3  # of such a request
_HASH_BYTES = 4  # kept of a block's hash: enough to say where two prompts differ


@dataclass(frozen=True)
class Divergence:
    """Where a turn's prompt of `num_tokens` differs from that of the turn that it goes on with:
    somewhere from token `first` on, before `end`; of the first such turn that is not known.
    `num_in_a_row`: such turns of the conversation until now, each after the other. `part`: what of
    the request differs, "" if nobody knows. `hashes`, `parts`: of the prompt, for the next one."""

    num_in_a_row: int
    first: int
    end: int
    num_tokens: int
    part: str = ""
    hashes: bytes = b""
    parts: str = ""

    @property
    def is_habit(self) -> bool:
        """Whether nothing is kept for the program: it diverges again and again, and its prompts
        begin with too little alike."""
        return self.num_in_a_row > TOLERATED and MIN_HEAD * self.first < self.num_tokens

    @property
    def why(self) -> str:
        part = f" ({self.part})" if self.part else ""
        return (
            f"{self.num_in_a_row} prompts in a row did not continue what was kept; this one "
            f"differs within tokens {self.first}..{self.end} of {self.num_tokens}{part}"
        )

    def as_dict(self) -> dict[str, Any]:
        told = {"in_a_row": self.num_in_a_row, "from": self.first, "to": self.end}
        part = {"part": self.part} if self.part else {}
        return {**told, "of": self.num_tokens, **part}


def find_divergence(
    newest: Iterable[tuple[Kept, Divergence | None]],
    request: Any,
    block_size: int,
    parts: str = "",
) -> Divergence | None:
    """How the prompt of a turn that continues none of a program's chains, `newest` first, differs
    from the one that it goes on with. None if it goes on with none, as a side request, a fork,
    another conversation. With each chain, how the turn differed that left it. `parts`: digests of
    what the request was made of, if the middleware saw it."""
    hashes, text = request.block_hashes, PromptText(request.prompt_token_ids)
    num_tokens = request.num_prompt_tokens
    for kept, last in islice(newest, MAX_CHAINS):
        if kept.is_told_again(hashes, num_tokens, text):
            return _after(last, hashes, num_tokens, block_size, parts)
    return None


def _after(
    last: Divergence | None, hashes: Sequence[bytes], num_tokens: int, block_size: int, parts: str
) -> Divergence:
    first, end, number, part = 0, num_tokens, 1, ""
    if last is not None:
        block = _differs_at(last.hashes, hashes)
        first, end = block * block_size, min((block + 1) * block_size, num_tokens)
        number, part = last.num_in_a_row + 1, _part(last.parts, parts)
    kept = b"".join([each[:_HASH_BYTES] for each in hashes])
    return Divergence(number, first, end, num_tokens, part, kept, parts)


def _differs_at(before: bytes, hashes: Sequence[bytes]) -> int:
    """The first block that differs; all after it do, as a hash covers all that comes before."""
    blocks = range(min(len(before) // _HASH_BYTES, len(hashes)))

    def differs(block: int) -> bool:
        was = before[block * _HASH_BYTES : (block + 1) * _HASH_BYTES]
        return bool(was != hashes[block][:_HASH_BYTES])

    return bisect_left(blocks, True, key=differs)


# --- which part of the request ----------------------------------------------------------
class _Parts(msgspec.Struct):
    """What a prompt is made of, in its order, as it came."""

    messages: list[msgspec.Raw]
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Parts)


def digests(body: bytes) -> str:
    """A digest of each part of a request's JSON, one after the other; "" if it has no messages that
    may repeat an answer."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return ""
    if len(found.messages) < MIN_MESSAGES:
        return ""
    parts = islice((found.tools, found.system, *found.messages), MAX_PARTS)
    return "".join([f"{zlib.crc32(part):0{DIGITS}x}" for part in parts])


def _part(before: str, parts: str) -> str:
    """The first part that differs, as people call it; "" if none does that we know of."""
    for at in range(0, min(len(before), len(parts)), DIGITS):
        if before[at : at + DIGITS] != parts[at : at + DIGITS]:
            number = at // DIGITS
            return ("tools", "system")[number] if number < 2 else f"message {number - 1}"
    return ""
