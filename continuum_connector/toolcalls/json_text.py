"""JSON as models write it: raw newlines, bad escapes, cut in the middle.

Everything here is linear in the text and never raises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice

_DECODER = json.JSONDecoder(strict=False)  # raw newlines in strings are common
_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*(")?|[{}\[\],]', re.DOTALL)
_NAME_BEFORE = re.compile(r'"(?:name|function|tool_name)"\s{0,8}:\s{0,8}$')
_PAIR = re.compile(
    r"""(["'])(\w{1,64})\1\s*:\s*(?:"((?:[^"\\]+|\\.)*)|'((?:[^'\\]+|\\.)*))""", re.DOTALL
)
MAX_TOKENS = 512  # strings, brackets and commas of a value that is not whole
MAX_DEPTH = 64  # no call nests deeper, and each level costs
_CLOSER = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Value:
    """What stands in the text: the value, the index behind it, whether it was all there."""

    value: object
    end: int
    finished: bool = True


def read_value(text: str, start: int) -> Value:
    """Read the JSON value that begins at `start`, as much of it as is there.

    A value that is malformed for good becomes a flat dict of its string members.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return _mended(text, start)
    return Value(value, end)


def _mended(text: str, start: int) -> Value:
    """Walk the brackets: a value that never closes is closed, one that does is picked apart."""
    stack: list[str] = []
    safe = start  # behind the last bracket or before the last comma: what came so far is whole
    tail = ""
    for token in islice(_TOKEN.finditer(text, start), MAX_TOKENS):
        mark = token[0]
        if mark[0] == '"':
            if token[1] is None:
                tail = _string_tail(text, token.start(), token.end())
            continue
        if mark in "{[":
            stack.append(_CLOSER[mark])
            if len(stack) > MAX_DEPTH:
                return Value(None, len(text), False)
        elif mark != "," and stack:
            stack.pop()
            if not stack:
                return Value(_picked(text[start : token.end()]), token.end())
        safe = token.start() if mark == "," else token.end()
    if not stack:  # no bracket at all
        return Value(None, start + 1, False)
    closers = "".join(reversed(stack))
    closed = _decoded(text[start:] + tail + closers)
    if closed is None:
        closed = _decoded(text[start:safe] + closers)
    return Value(_picked(text[start:]) if closed is None else closed, len(text), False)


def _decoded(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _string_tail(text: str, start: int, end: int) -> str:
    """What closes a string that the text ends in; half a name is not to be closed."""
    if _NAME_BEFORE.search(text[max(0, start - 32) : start]):
        return "\0"  # no JSON: the caller falls back to what came before
    return '\\"' if end < len(text) else '"'  # a lone backslash is left over


def _picked(text: str) -> dict[str, str]:
    """String members at any depth: the outermost `name` comes first and stays."""
    found: dict[str, str] = {}
    for match in _PAIR.finditer(text):
        value = match[3] if match[3] is not None else match[4]
        closed = match.end() < len(text)
        if closed or match[2] not in ("name", "function", "tool_name"):
            found.setdefault(match[2], _unescaped(value))
    return found


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
