"""Divergence: a prompt goes on with its program's conversation, but behind text that has changed.

A clock in the system prompt, tools in another order: the prompt repeats the last answer, yet from
some early block on no hash is as it was, so nothing that was kept behind it is found. An edit of
the context does that once; these clients do it in every turn, and then keeping is for nobody. All
that is needed to see that they continue again are the marks of the chains that their turns left.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from continuum_connector.programs.kept import Kept

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


def find(
    newest: Iterable[tuple[Kept, Divergence | None]],
    request: Any,
    block_size: int,
    parts: str = "",
) -> Divergence | None:
    """How the prompt of a turn that continues none of a program's chains, `newest` first, differs
    from the one that it goes on with. None if it goes on with none, as a side request, a fork,
    another conversation. With each chain, how the turn differed that left it. `parts`: digests of
    what the request was made of, if the middleware saw it."""
    hashes, tokens = request.block_hashes, request.prompt_token_ids
    num_tokens = request.num_prompt_tokens
    for kept, last in islice(newest, MAX_CHAINS):
        if kept.is_told_again(hashes, num_tokens, tokens):
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
