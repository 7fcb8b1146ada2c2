"""JSON as models write it (raw newlines, bad escapes, cut in the middle), and the calls in it.

Everything here is linear in the text and never raises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice

from continuum_connector.toolcalls.asked import MAX_CALLS, RawCall

_DECODER = json.JSONDecoder(strict=False)  # raw newlines in strings are common
_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*(")?|[{}\[\],]', re.DOTALL)
_NAME_BEFORE = re.compile(r'"(?:name|tool_name)"\s{0,8}:\s{0,8}$')
_PAIR = re.compile(
    r"""(["'])(\w{1,64})\1\s*:\s*(?:"((?:[^"\\]+|\\.)*)|'((?:[^'\\]+|\\.)*))""", re.DOTALL
)
MAX_TOKENS = 512  # strings, brackets and commas read of an incomplete value
MAX_DEPTH = 64  # no real call nests deeper, and each level takes time
_CLOSER = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Value:
    """A value in the text, the index after it, and whether all of it was there."""

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
    """Repair a value: close its brackets if the text ends inside, else pick out its strings."""
    stack: list[str] = []
    safe = start  # after the last bracket or before the last comma: up to here all is complete
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
    """What closes the string in which the text ends. Half a tool's name must not be closed."""
    if _NAME_BEFORE.search(text[max(0, start - 32) : start]):
        return "\0"  # not JSON, so the caller falls back to what came before
    return '\\"' if end < len(text) else '"'  # escape a backslash that is left alone


def _picked(text: str) -> dict[str, str]:
    """The string members at any depth; of several with one name the first, outermost one stays."""
    found: dict[str, str] = {}
    for match in _PAIR.finditer(text):
        value = match[3] if match[3] is not None else match[4]
        closed = match.end() < len(text)
        if closed or match[2] not in NAMES:
            found.setdefault(match[2], _unescaped(value))
    return found


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")


NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
_BETWEEN = " \t\r\n;,"


def read_calls(text: str, start: int, sure: bool) -> tuple[list[RawCall], int]:
    """Read JSON calls from `start`, one after the other; return them and where they end.

    `sure`: a marker says that they are calls. Without one, an object must have a name and
    arguments to be one.
    """
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS:
        while start < len(text) and text[start] in _BETWEEN:
            start += 1
        if text[start : start + 1] not in ("{", "["):
            break
        value = read_value(text, start)
        found = calls_of(value.value, sure, value.finished)
        start = value.end
        if not found:
            if sure and not value.finished:  # a call has begun, but the text ends before its name
                calls.append(RawCall("", finished=False))
            break
        calls += found
    return calls[:MAX_CALLS], start


def calls_of(value: object, sure: bool, finished: bool = True) -> list[RawCall]:
    """The calls in a JSON value: one object or a list."""
    if isinstance(value, list):
        each = [call for item in value[:MAX_CALLS] for call in calls_of(item, sure)]
        return [*each[:-1], RawCall(each[-1].name, each[-1].arguments, finished)] if each else []
    if not isinstance(value, dict):
        return []
    name = next((value[key] for key in NAMES if isinstance(value.get(key), str)), None)
    key = next((key for key in ARGUMENTS if key in value), None)
    if name is None:
        return _named_by_key(value, finished) if sure else []
    if key is None:
        if not sure:
            return []
        rest = {k: v for k, v in value.items() if k not in (*NAMES, "type", "id")}
        return [RawCall(name, rest or None, finished)]
    return [RawCall(name, _decoded_object(value[key]), finished)]


def _named_by_key(value: dict[str, object], finished: bool) -> list[RawCall]:
    """{"get_weather": {"city": ...}}, as Apertus writes it."""
    if len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, dict):
            return [RawCall(name, arguments, finished)]
    return []


def _decoded_object(arguments: object) -> object:
    """OpenAI's arguments are JSON in a string."""
    if isinstance(arguments, str):
        start = len(arguments) - len(arguments.lstrip())
        if arguments[start : start + 1] == "{":
            return read_value(arguments, start).value
    return arguments
