"""BackgroundTokenizer: the server's tokenizer, loaded by a thread when somebody needs it.

Loading takes seconds and hundreds of MB, so it happens once and nobody waits for it. Until it is
loaded, and for ever if it cannot be, `get` answers None and its users do without.

Markers: the ids of the markers that a tokenizer has. They say where to begin to read a turn's
output before any of it is decoded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from continuum_connector.toolcalls import special_tokens, tags
from continuum_connector.toolcalls.parse import CLOSERS, OPENERS

logger = logging.getLogger(f"vllm.{__name__}")


class BackgroundTokenizer:
    """Owns the tokenizer and the thread that loads it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        """`load` returns the tokenizer, or None if the server runs without one."""
        self._load = load
        self._prepare: list[Callable[[Any], None]] = []
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None

    def when_loaded(self, prepare: Callable[[Any], None]) -> None:
        """Let `prepare(tokenizer)` run in the background before `get` hands it out.

        Call it before `start`.
        """
        self._prepare.append(prepare)

    def start(self) -> None:
        """Begin to load it, once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="continuum-tokenizer", daemon=True
            )
            self._thread.start()

    def get(self) -> Any:
        """The tokenizer; None if nobody asked for it, or it is not loaded yet, or cannot be."""
        return self._tokenizer

    def join(self) -> None:
        """Wait for the thread; for callers that have the time."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            tokenizer = self._load()
            if tokenizer is not None:
                for prepare in self._prepare:
                    prepare(tokenizer)
            self._tokenizer = tokenizer
        except Exception as error:
            logger.warning(
                "ContinuumConnector cannot load the tokenizer (%s), so tool calls stay unread "
                "and a client that disconnects looks like a stop string: such turns are kept "
                "until their TTL; let --tokenizer name one that this process can read, or "
                "declare `tools` in each request",
                error,
            )


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
        ids(OPENERS),
        ids(CLOSERS),
        ids([MESSAGE]) if CHANNEL in vocabulary else frozenset(),
    )
