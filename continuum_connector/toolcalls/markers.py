"""The token ids of the markers that a tokenizer has: where to begin reading, without decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from continuum_connector.toolcalls import thinking
from continuum_connector.toolcalls.formats import special_tokens, tags

CALLS = (
    tags.TOOL_CALL,
    special_tokens.MISTRAL,
    special_tokens.DEEPSEEK.begin,
    special_tokens.KIMI.begin,
    *(marker for marker in special_tokens.MARKERS if marker.startswith("<|")),
)
ENDS = (tags.TOOL_CALL_END, special_tokens.DEEPSEEK.end, special_tokens.KIMI.end)
MESSAGE = "<|start|>"  # begins each of harmony's messages
CHANNEL = "<|channel|>"  # and only harmony has both


@dataclass(frozen=True)
class Span:
    """Which part of a tail to decode. `at_call`: it begins with a call's marker.

    `is_late`: a call ends in the tail that does not begin there.
    """

    begin: int = 0
    at_call: bool = False
    is_late: bool = False


@dataclass(frozen=True)
class Markers:
    """Ids of one tokenizer's markers; none where it spells them out in several tokens."""

    calls: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    thinks: frozenset[int] = frozenset()
    speaks: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()

    @cached_property
    def known(self) -> frozenset[int]:
        """All of them: most tokens are none."""
        return self.calls | self.ends | self.thinks | self.speaks | self.messages

    def span(self, tail: Sequence[int]) -> Span:
        """Find what to decode of the tail: what follows the thinking, from its first call on.

        Thinking that does not end is decoded with its opening tag: a call may have ended it.
        """
        begin, is_thinking, is_late = 0, False, False
        call = -1
        known = self.known
        for at, token in [hit for hit in enumerate(tail) if hit[1] in known]:
            if token in self.speaks or token in self.messages:
                begin, call, is_thinking = at + (token in self.speaks), -1, False
            elif token in self.thinks:
                begin, is_thinking = begin if is_thinking else at, True
            elif token in self.calls:
                call = at if call < 0 else call
            elif token in self.ends:
                is_late = is_late or call < 0
        if call >= 0 and not is_thinking:
            return Span(call, at_call=True)
        return Span(begin, is_late=is_late and not is_thinking)

    def last_call(self, token_ids: Sequence[int]) -> int:
        """Where the last call begins, or -1."""
        for at in range(len(token_ids) - 1, -1, -1):
            if token_ids[at] in self.calls:
                return at
        return -1


def markers_of(tokenizer: Any) -> Markers:
    """Look the markers up in the vocabulary, of which vLLM's tokenizers keep a copy."""
    try:
        vocabulary = tokenizer.get_vocab()
    except Exception:  # no tokenizer of vLLM's; its texts are then read from their end
        return Markers()

    def ids(markers: Iterable[str]) -> frozenset[int]:
        return frozenset(vocabulary[marker] for marker in markers if marker in vocabulary)

    return Markers(
        ids(CALLS),
        ids(ENDS),
        ids(thinking.OPENERS),
        ids(thinking.CLOSERS),
        ids([MESSAGE]) if CHANNEL in vocabulary else frozenset(),
    )
