"""Endings: did a turn end, or did its client go away?

Stop strings are matched in the API server, which then aborts the request: the scheduler
sees FINISHED_ABORTED for both (vLLM v1/engine/output_processor.py). The text tells them
apart. The tokenizer begins to load when the first request with stop strings arrives.
"""

from __future__ import annotations

from typing import Any

from continuum_connector.toolcalls.tokenizer import BackgroundTokenizer

TAIL_TOKENS = 64  # stop strings are short; async scheduling adds a few tokens after them


class Endings:
    """Finds out how aborted turns ended."""

    def __init__(self, tokenizer: BackgroundTokenizer) -> None:
        self._tokenizer = tokenizer

    def expect(self, request: Any) -> None:
        """A turn arrives; if it has stop strings, begin to load the tokenizer."""
        if _stop_strings(request):
            self._tokenizer.start()

    def went_away(self, request: Any) -> bool:
        """Whether an aborted turn's client is gone.

        If the turn has no stop strings, it is. Otherwise the text decides. While the tokenizer is
        not loaded, the turn counts as ended, because a pin is a preference and expires by itself.
        """
        stops = _stop_strings(request)
        if not stops or not request.num_output_tokens:
            return True
        tokenizer = self._tokenizer.get()
        if tokenizer is None:
            return False
        try:
            text = tokenizer.decode(list(request.output_token_ids[-TAIL_TOKENS:]))
        except Exception:  # a tokenizer may raise on any id; the step must go on
            return False
        return not any(stop in text for stop in stops)


def _stop_strings(request: Any) -> list[str]:
    params = request.sampling_params
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
