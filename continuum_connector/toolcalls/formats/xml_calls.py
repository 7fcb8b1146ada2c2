"""Calls as XML: Anthropic's <invoke name="x">, MiniMax and DeepSeek V3.2 with a prefix, and
Qwen3-Coder's <function=x><parameter=y>."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_value
from continuum_connector.toolcalls.raw_calls import RawCall, read_each

_PREFIX = r"[\w:｜|]{0,24}? ?"
_OPEN = re.compile(
    rf"<{_PREFIX}(?:function=|(?:invoke|function)\s{{1,8}}name\s{{0,8}}=\s{{0,8}})"
    r"[\"']?([^\"'<>\n]{1,128})[\"']?\s{0,8}>"
)
_CLOSE = re.compile(rf"</{_PREFIX}(?:invoke|function)>")
_PARAMETER = re.compile(
    rf"<{_PREFIX}param(?:eter)?(?:=|\s{{1,8}}name\s{{0,8}}=\s{{0,8}})"
    r"[\"']?([^\"'<>\n]{1,128})(?:[\"'][^<>\n]{0,64})?>"
)
_PARAMETER_END = re.compile(rf"</{_PREFIX}param(?:eter)?>")


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    # a marker may stand behind the prefix that begins its tag
    position = max(text.rfind("<", max(0, start - 24), start + 1), 0)
    return read_each(text, position, _OPEN, read_one)


def read_one(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
    """Read the call whose opening tag is `opened`; return it and where it ends."""
    position = opened.end()
    found: dict[str, object] = {}
    for _ in range(MAX_CALLS * 4):
        key = _PARAMETER.search(text, position)
        end = _CLOSE.search(text, position, key.start() if key else len(text))
        if end is not None or key is None:
            arguments = found or _json_body(text, opened.end())
            at = end.end() if end is not None else len(text)
            return RawCall(opened[1], arguments, end is not None), at
        close = _PARAMETER_END.search(text, key.end())
        position = close.end() if close is not None else len(text)
        value_end = close.start() if close is not None else len(text)
        found[key[1]] = text[key.end() : value_end].strip("\n")
    return RawCall(opened[1], found), position


def _json_body(text: str, start: int) -> object:
    """Llama 3.1 writes <function=name>{json}</function>."""
    while start < len(text) and text[start] in " \n":
        start += 1
    return read_value(text, start).value if text[start : start + 1] == "{" else None


READERS = dict.fromkeys(
    (
        "<function=",
        "<invoke",
        ":invoke",
        "｜invoke",
        "｜ invoke",
        "<function name=",
    ),
    read,
)
