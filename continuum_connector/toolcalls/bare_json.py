"""A message that is JSON without any marker: Llama 3's calls, or commands for a terminal."""

from __future__ import annotations

import re

from continuum_connector.toolcalls import terminal_json
from continuum_connector.toolcalls.json_calls import read_calls
from continuum_connector.toolcalls.json_text import read_value
from continuum_connector.toolcalls.raw_call import RawCall

_START = re.compile(r"(?:^|\n)[ \t]{0,8}(?=[{\[][\s\"{\[])")
MAX_TRIES = 4  # prose may hold other JSON before it


def read(text: str) -> list[RawCall]:
    """Read the calls of the first JSON in the text that has any."""
    position = 0
    for _ in range(MAX_TRIES):
        begins = _START.search(text, position)
        if begins is None:
            return []
        value = read_value(text, begins.end())
        if isinstance(value.value, dict) and terminal_json.is_terminal(value.value):
            return terminal_json.calls_of(value.value, value.finished)
        calls, _ = read_calls(text, begins.end(), sure=False)
        if calls:
            return calls
        position = max(value.end, begins.end() + 1)
    return []
