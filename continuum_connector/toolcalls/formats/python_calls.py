"""Python-style calls: [get_weather(city="Paris"), get_time()], or one call a line."""

from __future__ import annotations

import re
from itertools import islice

from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.raw_calls import RawCall

_HEAD = re.compile(r"[\s,;]{0,64}([A-Za-z_][\w.]{0,127})\(")
_TOKEN = re.compile(r"\"(?:[^\"\\]+|\\.)*(\")?|'(?:[^'\\]+|\\.)*(')?|([()\[\]{},])", re.DOTALL)
_KEY = re.compile(r"\s{0,16}([A-Za-z_]\w{0,63})\s{0,16}=(?!=)\s{0,16}")
_OPENING = "([{"
MAX_TOKENS = 512  # strings, brackets and commas of one call


def read(text: str, sure: bool) -> list[RawCall]:
    """Read a text that is nothing but calls.

    `sure`: a marker or a `[` says that they are calls. Without one, each must name its
    parameters, for `print(x)` is prose about code.
    """
    text = text.strip()
    listed = text.startswith("[")
    position = 1 if listed else 0
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (head := _HEAD.match(text, position)):
        call, position = _read_one(text, head)
        if not isinstance(call.arguments, dict) or not (call.arguments or sure or listed):
            return []
        calls.append(call)
    rest = text[position : position + 32].lstrip()
    if not calls or (rest and rest[0] not in ",]<" and len(calls) < MAX_CALLS and not sure):
        return []
    return calls


def _read_one(text: str, head: re.Match[str]) -> tuple[RawCall, int]:
    """Read one call up to its `)`. Positional arguments make `arguments` a text, no dict."""
    depth, begin = 1, head.end()
    parts: list[str] = []
    for token in islice(_TOKEN.finditer(text, head.end()), MAX_TOKENS):
        mark = token[3]
        if mark is None:
            continue
        if mark in _OPENING:
            depth += 1
        elif mark == ",":
            if depth == 1:
                parts.append(text[begin : token.start()])
                begin = token.end()
        else:
            depth -= 1
        if depth == 0:
            parts.append(text[begin : token.start()])
            return RawCall(head[1], _arguments(parts)), token.end()
    parts.append(text[begin:])
    return RawCall(head[1], _arguments(parts), finished=False), len(text)


def _arguments(parts: list[str]) -> object:
    found: dict[str, object] = {}
    for part in parts:
        key = _KEY.match(part)
        if key is None:
            if part.strip():
                return ",".join(parts)
            continue
        found[key[1]] = _literal(part[key.end() :].strip())
    return found


def _literal(value: str) -> object:
    if value[:1] in ("'", '"'):
        return value[1:].removesuffix(value[0])
    try:
        return float(value[:32])
    except ValueError:
        return value
