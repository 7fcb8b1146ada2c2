"""Gemma: <|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>, FunctionGemma alike."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall, read_each
from continuum_connector.toolcalls.asked import MAX_CALLS

MARKERS = ("<|tool_call>call:", "<start_function_call>call:")
_CALL = re.compile(r"(?:<\|tool_call>|<start_function_call>)call:([\w.\-]{1,128})\{")
_KEY = re.compile(r"[\s,]{0,16}(\w{1,64}):(<escape>|<\|\"\|>)?")
_PLAIN_END = re.compile(r"[,}]")


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
        if key[2] is None:
            plain = _PLAIN_END.search(text, key.end())
            position = end = plain.start() if plain else len(text)
        else:
            end = text.find(key[2], key.end())
            position = end + len(key[2]) if end >= 0 else len(text)
            end = end if end >= 0 else len(text)
        found[key[1]] = text[key.end() : end]
    return RawCall(opened[1], found, text[position : position + 1] == "}"), position
