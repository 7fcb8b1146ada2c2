"""Mistral: [TOOL_CALLS][{...}, ...], and since its v11 tokenizer [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_calls, read_value

OPEN = "[TOOL_CALLS]"
MARKERS = (OPEN,)
_NAME = re.compile(r"\s{0,8}([\w.\-]{1,128})(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)")
_NAME_ONLY = re.compile(r"\s{0,8}([\w.\-]{1,128})\[(?:ARGS|CALL_ID)\]")


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (start := text.find(OPEN, start)) >= 0:
        start += len(OPEN)
        if named := _NAME.match(text, start):
            value = read_value(text, named.end())
            calls.append(RawCall(named[1], value.value, value.finished))
            start = value.end
        elif named := _NAME_ONLY.match(text, start):
            calls.append(RawCall(named[1], None, False))
        else:
            found, start = read_calls(text, start, sure=True)
            calls += found or [RawCall("", finished=False)]
    return calls[:MAX_CALLS]
