"""<tool_call>: Hermes and Qwen put JSON into it, Qwen3-Coder XML, GLM a name and its pairs."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_calls
from continuum_connector.toolcalls.formats.xml_calls import read as read_xml

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN,)
MAX_TAGS = 2 * MAX_CALLS  # looked into: a text about the tag may hold hundreds that are no calls
_NAME_END = re.compile(r"[\n<{]")
_TYPE = r"(?:<arg_type>[^<]{0,64}</arg_type>\s{0,8})?"  # K2 Horizon
_PAIR = re.compile(rf"<arg_key>([^<]{{1,128}})</arg_key>\s{{0,8}}{_TYPE}<arg_value>")
_VALUE_END = "</arg_value>"


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    calls: list[RawCall] = []
    for _ in range(MAX_TAGS):
        if len(calls) >= MAX_CALLS or (start := text.find(OPEN, start)) < 0:
            break
        start += len(OPEN)
        while start < len(text) and text[start] in " \t\r\n":
            start += 1
        if text[start : start + 1] in ("{", "["):
            found, start = read_calls(text, start, sure=True)
        else:
            end = text.find(CLOSE, start)
            body = text[start : end if end >= 0 else len(text)]
            found = _in_tag(body, end >= 0)
            start += len(body)
        calls += found
    return calls[:MAX_CALLS]


def _in_tag(body: str, finished: bool) -> list[RawCall]:
    if body.startswith("<"):
        return read_xml(body, 0) or [RawCall("", finished=False)]
    end = _NAME_END.search(body)
    if end is None:
        return [RawCall(body.strip() if finished else "", None, finished)]
    name = body[: end.start()].strip()
    found: dict[str, object] = {}
    position = end.start()
    for _ in range(MAX_CALLS * 4):
        key = _PAIR.search(body, position)
        if key is None:
            break
        close = body.find(_VALUE_END, key.end())
        position = close if close >= 0 else len(body)
        found[key[1].strip()] = body[key.end() : position].strip("\n")
    return [RawCall(name, found or None, finished)]
