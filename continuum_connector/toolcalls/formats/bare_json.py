"""A message that is JSON without any marker: Llama 3's calls, or commands for a terminal."""

from __future__ import annotations

import re
from itertools import islice

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.formats import terminal_json
from continuum_connector.toolcalls.formats.json_calls import read_calls, read_value

_START = re.compile(r"[{\[](?=[\s\"{\[])")
MAX_INDENT = 8
MAX_BRACKETS = 256  # looked at
MAX_TRIES = 4  # prose may hold other JSON before it


def read(text: str) -> list[RawCall]:
    """Read the calls of the first JSON in the text that has any."""
    position = num_tries = 0
    for begins in islice(_START.finditer(text), MAX_BRACKETS):
        start = begins.start()
        if start < position or not _begins_line(text, start):
            continue
        value = read_value(text, start)
        if isinstance(value.value, dict) and terminal_json.is_terminal(value.value):
            return terminal_json.calls_of(value.value, value.finished)
        calls, _ = read_calls(text, start, sure=False)
        if calls:
            return calls
        position = value.end
        num_tries += 1
        if num_tries == MAX_TRIES:
            break
    return []


def _begins_line(text: str, start: int) -> bool:
    """Whether only a few blanks stand before `start` in its line."""
    first = max(0, start - MAX_INDENT)
    before = text[first:start].rstrip(" \t")
    return before.endswith("\n") or (not before and first == 0)
