"""Ending: did a turn end, or did its client go away?

Stop strings are matched in the API server, which then aborts the request: the scheduler
sees FINISHED_ABORTED for both (vLLM v1/engine/output_processor.py). The text tells them
apart. The tokenizer is loaded in the background when the first such request arrives, for
it takes seconds and hundreds of MB that most servers never need.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

TAIL_TOKENS = 64  # stop strings are short, and async scheduling adds a few tokens after them


class Endings:
    """Knows how aborted turns ended."""

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._load = load_tokenizer
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None

    def expect(self, request: Any) -> None:
        """A turn arrives; if it has stop strings, its tokenizer will be needed."""
        if self._thread is None and _stop_strings(request):
            self._thread = threading.Thread(
                target=self._run, name="continuum-tokenizer", daemon=True
            )
            self._thread.start()

    def went_away(self, request: Any) -> bool:
        """Whether an aborted turn's client is gone.

        Without stop strings it is. With them, the text decides; while the tokenizer is not
        loaded the turn counts as ended, for a pin is a preference and expires by itself.
        """
        stops = _stop_strings(request)
        if not stops or not request.num_output_tokens:
            return True
        if self._tokenizer is None:
            return False
        text = self._tokenizer.decode(list(request.output_token_ids[-TAIL_TOKENS:]))
        return not any(stop in text for stop in stops)

    def _run(self) -> None:
        try:
            self._tokenizer = self._load()
        except Exception as error:
            logger.warning(
                "ContinuumConnector cannot load the tokenizer (%s), so a client that disconnects "
                "looks like a stop string: such turns are kept until their TTL",
                error,
            )


def _stop_strings(request: Any) -> list[str]:
    params = request.sampling_params
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
