"""ToolReader: what a finished turn asks for, from its last output tokens.

Decoding and parsing happen in the scheduler's step: no reading begins there once they have taken
BUDGET_S, and on a machine where one would take longer, fewer tokens are read. The server's
tokenizer is loaded by a thread when somebody needs it. That takes seconds and hundreds of MB, so it
happens once and nobody waits for it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from continuum_connector.toolcalls.formats import (
    BEGINNINGS,
    BLOCK,
    CUT,
    ENDS,
    THINKING,
    UNREAD,
    Asked,
    parse,
)

logger = logging.getLogger(f"vllm.{__name__}")

TAIL_TOKENS = 512  # calls are short
HEAD_TOKENS = 128  # read of a call that began before the tail: its name, and most of its keys
LOOK_BACK_TOKENS = 4096  # how far back we search for its beginning, by token id
PROMPT_TOKENS = 1024  # of a prompt's beginning, where agents say what they want
STOP_TOKENS = 64  # stop strings are short; async scheduling adds a few tokens after them
BUDGET_S = 0.75e-3  # per step


class ToolReader:
    """Reads what turns said. For each whose tool calls it does not read, it reports the reason."""

    def __init__(
        self, load: Callable[[], Any], timer: Callable[[], float], not_read: Callable[[str], None]
    ) -> None:
        """`load` returns the tokenizer, or None if the server runs without one. `timer`:
        time.perf_counter, or a fake. `not_read`: called with a reason of WHY_UNREAD."""
        self._load = load
        self._timer = timer
        self._told = not_read
        self._thread: threading.Thread | None = None
        self._tokenizer: Any = None  # None until it is loaded, or if it cannot be
        self._spent_s = 0.0  # in this step
        self._num_tail = TAIL_TOKENS
        self._kinds: Mapping[int, str] = {}  # the first letter of each, by id

    def start(self) -> None:
        """Begin to load the tokenizer, once; call it when the first turn arrives that is to be
        read."""
        if self._thread is None:
            name = "continuum-tokenizer"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the tokenizer; for callers that have the time, after `start`."""
        assert self._thread is not None
        self._thread.join()

    def new_step(self) -> None:
        """A step of the engine begins."""
        self._spent_s = 0.0

    def read(self, output_token_ids: Sequence[int], *, truncated: bool = False) -> Asked:
        """Say what the turn with this output asks for. It never raises.

        `truncated`: the turn ended at its token limit or at the model's.
        """
        if self._tokenizer is None:
            return self._not_read("no_tokenizer")
        if not output_token_ids:
            return CUT
        if self._spent_s >= BUDGET_S:
            return self._not_read("no_time")
        begin_s = self._timer()
        try:
            token_ids, is_cut, headless = self._choose(output_token_ids)
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            return parse(text, truncated=truncated and not is_cut, headless=headless)
        except Exception:  # a tokenizer may raise on any id; the step must go on
            return self._not_read("error")
        finally:
            self._spent_s += self._timer() - begin_s

    def asks_for_blocks(self, prompt_token_ids: Sequence[int] | None) -> bool:
        """Whether a prompt's beginning speaks of shell blocks, as the instructions of agents that
        run them do, and a person's question does not. It never raises."""
        begin_s = self._timer()
        try:
            text = self._tokenizer.decode(list((prompt_token_ids or ())[:PROMPT_TOKENS]))
        except Exception:
            return False
        finally:
            self._spent_s += self._timer() - begin_s
        return re.search(rf"{BLOCK}\b", text) is not None

    # --- turns with stop strings ------------------------------------------------------------
    # vLLM matches them in the API server, which then aborts the request: for the scheduler it ends
    # as FINISHED_ABORTED, as when its client goes away (v1/engine/output_processor.py). The text
    # tells one from the other.
    def arrived(self, request: Any) -> None:
        """A turn arrives; if it has stop strings, begin to load the tokenizer."""
        if _stop_strings(request):
            self.start()

    def went_away(self, request: Any) -> bool:
        """Whether an aborted turn's client is gone.

        If the turn has no stop strings, it is. Otherwise the text decides. While the tokenizer is
        not loaded, the turn counts as ended, because a pin is a preference and expires by itself.
        """
        stops = _stop_strings(request)
        if not stops or not request.num_output_tokens:
            return True
        try:
            text = self._tokenizer.decode(list(request.output_token_ids[-STOP_TOKENS:]))
        except Exception:  # there is none, or it raises; the step must go on
            return False
        return not any(stop in text for stop in stops)

    # --- parts ---------------------------------------------------------------------------
    def _choose(self, output_token_ids: Sequence[int]) -> tuple[list[int], bool, bool]:
        """Choose the tokens to decode: those after the thinking, from the first call on. Thinking
        that does not end is decoded with its opening tag, as a call may have ended it.

        Also return whether the end of a call is left out, and whether the beginning is missing.
        """
        tail, kinds = list(output_token_ids[-self._num_tail :]), self._kinds
        marks = "".join([kinds.get(token, ".") for token in tail])
        begin = max(marks.rfind("s") + 1, marks.rfind("m"))
        if first := re.compile("[tc]").search(marks, begin):
            return tail[first.start() :], False, False
        is_longer = len(output_token_ids) > len(tail)
        if is_longer and marks.find("e", begin) >= 0:  # of a call that begins before the tail
            earlier = list(output_token_ids[-LOOK_BACK_TOKENS : -len(tail)])
            call = "".join([kinds.get(token, ".") for token in earlier]).rfind("c")
            if call >= 0:
                return (earlier[call:] + tail)[:HEAD_TOKENS], True, False
        return tail[begin:], False, is_longer and begin == 0

    def _not_read(self, reason: str) -> Asked:
        self._told(reason)
        return UNREAD

    def _run(self) -> None:
        try:
            tokenizer = self._load()
            if tokenizer is not None:
                self._warm_up(tokenizer)
            self._tokenizer = tokenizer
        except Exception as error:
            logger.warning(
                "ContinuumConnector cannot load the tokenizer (%s), so tool calls stay unread "
                "and a client that disconnects looks like a stop string: such turns are kept "
                "until their TTL; let --tokenizer name one that this process can read, or "
                "declare `tools` in each request",
                error,
            )

    def _warm_up(self, tokenizer: Any) -> None:
        """Learn the markers, and how many tokens the budget allows."""
        self._kinds = {token: kind[0] for token, kind in kinds_of(tokenizer).items()}
        durations_s = []
        with suppress(Exception):  # the vocabulary is smaller
            for _ in range(3):  # the first is slow, and one may be interrupted
                begin_s = self._timer()
                parse(tokenizer.decode(list(range(TAIL_TOKENS)), skip_special_tokens=False))
                durations_s.append(self._timer() - begin_s)
            affordable = TAIL_TOKENS * BUDGET_S / max(min(durations_s), 1e-9)
            self._num_tail = int(min(TAIL_TOKENS, max(HEAD_TOKENS, affordable)))


KINDS = {"call": BEGINNINGS, "end": ENDS, "think": THINKING, "speak": THINKING.values()}
MESSAGE, CHANNEL = "<|start|>", "<|channel|>"  # harmony's messages begin; only it has both


def kinds_of(tokenizer: Any) -> dict[int, str]:
    """What the markers in a tokenizer's vocabulary are, by id; vLLM's tokenizers keep a copy. A
    marker that is spelled out in several tokens has no id."""
    try:
        vocabulary = tokenizer.get_vocab()
    except Exception:  # no tokenizer of vLLM's; its texts are then read from their end
        return {}
    kinds = [(kind, [each for each in KINDS[kind] if each[0] in "<["]) for kind in KINDS]
    kinds.append(("message", [MESSAGE] if CHANNEL in vocabulary else []))
    return {vocabulary[each]: kind for kind, all_ in kinds for each in all_ if each in vocabulary}


def _stop_strings(request: Any) -> list[str]:
    params = request.sampling_params
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
