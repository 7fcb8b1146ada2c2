"""Kimi K3: <|open|>call tool="x"<|sep|><|open|>argument key="k"<|sep|>value<|close|>argument..."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall, read_each
from continuum_connector.toolcalls.asked import MAX_CALLS

MARKERS = ("<|open|>call ",)
_CALL = re.compile(
    r"<\|open\|>call [^<>\n]{0,64}?tool=\"([^\"<>\n]{1,128})\"[^<>\n]{0,64}<\|sep\|>"
)
_KEY = re.compile(
    r"<\|open\|>argument [^<>\n]{0,64}?key=\"([^\"<>\n]{1,128})\"[^<>\n]{0,64}<\|sep\|>"
)
_CALL_END = "<|close|>call<|sep|>"
_VALUE_END = "<|close|>argument<|sep|>"


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    return read_each(text, start, _CALL, _read_one) or [RawCall("", finished=False)]


def _read_one(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
    found: dict[str, object] = {}
    position = opened.end()
    for _ in range(MAX_CALLS * 4):
        key = _KEY.match(text, position)
        if key is None:
            break
        close = text.find(_VALUE_END, key.end())
        end = close if close >= 0 else len(text)
        found[key[1]] = text[key.end() : end]
        position = end + len(_VALUE_END)
    return RawCall(opened[1], found or None, text.startswith(_CALL_END, position)), position
