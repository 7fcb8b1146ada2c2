"""Divergence: a prompt goes on with its program's conversation, but behind text that has changed.

A clock in the system prompt, tools in another order: the prompt repeats the last answer, yet from
some early block on no hash is as it was, so nothing that was kept behind it is found. An edit of
the context does that once; these clients do it in every turn, and then keeping is for nobody. All
that is needed to see that they continue again are the marks of the chains that their turns left.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from continuum_connector.programs.program import Identity, Program

TOLERATED = 1  # such turns in a row
MIN_HEAD = 8  # a program whose prompts share an eighth of them is paid for as ever
MAX_CHAINS = 4  # of a program, the newest, that a prompt is compared with
MAX_PARTS, DIGITS = 32, 8  # of a request, whose digests the middleware sends
MIN_MESSAGES = 3  # of such a request
_HASH_BYTES = 4  # kept of a block's hash: enough to say where two prompts differ


@dataclass(frozen=True)
class Divergence:
    """Where a turn's prompt of `num_tokens` differs from what it was: somewhere from token `first`
    on, before `end`. `num_in_a_row`: such turns of the program until now, none of which continued
    anything. `part`: what of the request that is, "" if nobody knows. `hashes`, `parts`: of the
    prompt, for the next one."""

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
        return (
            f"{self.num_in_a_row} prompts in a row did not continue what was kept; {self.where()}"
        )

    def where(self) -> str:
        part = f" ({self.part})" if self.part else ""
        return f"this one differs within tokens {self.first}..{self.end} of {self.num_tokens}{part}"

    def as_dict(self) -> dict[str, Any]:
        told = {"in_a_row": self.num_in_a_row, "from": self.first, "to": self.end}
        part = {"part": self.part} if self.part else {}
        return {**told, "of": self.num_tokens, **part}


def note(
    program: Program, identity: Identity, since: float | None, request: Any, block_size: int
) -> Divergence | None:
    """A turn comes that continues what was left at `since`, None: nothing. Return how its prompt
    differs from those that it goes on with; None if it continues, or goes on with none, as a side
    request, a fork, another conversation."""
    found = None
    if since is None and program.left and not identity.hints.compaction:
        found = _find(program, request, block_size, identity.parts)
    program.went_on(since, found)
    return found


def _find(program: Program, request: Any, block_size: int, parts: str) -> Divergence | None:
    hashes, tokens = request.block_hashes, request.prompt_token_ids
    num_tokens = request.num_prompt_tokens
    newest = islice(reversed(program.left.values()), MAX_CHAINS)
    chain = next((each for each in newest if each.is_told_again(hashes, num_tokens, tokens)), None)
    if chain is None:
        return None
    last = program.diverged
    first, end = chain.differs_within(hashes)
    if last is not None:
        first, end = _differs_at(last.hashes, hashes)
    return Divergence(
        num_in_a_row=1 if last is None else last.num_in_a_row + 1,
        first=first * block_size,
        end=min(end * block_size, num_tokens),
        num_tokens=num_tokens,
        part="" if last is None else _part(last.parts, parts),
        hashes=b"".join([each[:_HASH_BYTES] for each in hashes]),
        parts=parts,
    )


def _differs_at(before: bytes, hashes: Sequence[bytes]) -> tuple[int, int]:
    """The first block that differs, and the one after it: a hash covers all that comes before."""
    blocks = range(min(len(before) // _HASH_BYTES, len(hashes)))

    def differs(block: int) -> bool:
        was = before[block * _HASH_BYTES : (block + 1) * _HASH_BYTES]
        return bool(was != hashes[block][:_HASH_BYTES])

    first = bisect_left(blocks, True, key=differs)
    return first, first + 1


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
