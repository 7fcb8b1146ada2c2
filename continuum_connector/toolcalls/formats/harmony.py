"""Harmony, gpt-oss' format: messages with a channel, and for a call a recipient.

`<|channel|>analysis` is thinking, `final` is for a person; `to=functions.x` in a header makes
the message a call, on whichever channel.
"""

from __future__ import annotations

import re
from itertools import islice

from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_value
from continuum_connector.toolcalls.formats.xml_calls import read as read_xml
from continuum_connector.toolcalls.raw_calls import RawCall

_TOKEN = re.compile(r"<\|(start|end|call|return|message|eom|eot)\|>")
_END = re.compile(r"<\|(?:end|call|return)\|>")
_NO_TOOL = ("self", "user", "commentary", "developer")  # to whom Muse thinks and speaks
MAX_HEADER = 256  # characters
MAX_TOKENS = 8 * MAX_CALLS  # of harmony's; a message has three
_RECIPIENT = re.compile(r" to=([\w.\-]{1,128})")


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls of every message; a recipient may stand before the marker at `start`."""
    calls: list[RawCall] = []
    header_at, recipient, body_at = max(0, start - MAX_HEADER), "", -1
    for token in islice(_TOKEN.finditer(text, header_at), MAX_TOKENS):
        if token[1] == "message":
            header_at = max(header_at, token.start() - MAX_HEADER)
            found = _recipient(text, header_at, token.start())
            recipient, body_at = (found[1] if found else ""), token.end()
            continue
        if recipient and body_at >= 0:
            calls.append(_call(recipient, text[body_at : token.start()], True))
        header_at, recipient, body_at = token.end(), "", -1
        if len(calls) >= MAX_CALLS:
            return calls
    if recipient:
        calls.append(_call(recipient, text[body_at:], False))
    elif body_at < 0 and (found := _recipient(text, header_at, len(text))):
        whole = found.end() < len(text)  # else the name itself may be cut
        calls.append(RawCall(found[1] if whole else "", finished=False))
    return calls


def is_thinking(text: str) -> bool:
    """Whether the text ends inside the analysis channel."""
    last = text.rfind("<|channel|>")
    return text.startswith("<|channel|>analysis", last) and not _END.search(text, last)


def _recipient(text: str, start: int, end: int) -> re.Match[str] | None:
    at = text.find(" to=", start, end)
    found = _RECIPIENT.match(text, at, end) if at >= 0 else None
    return None if found is None or found[1] in _NO_TOOL else found


def _call(recipient: str, body: str, finished: bool) -> RawCall:
    if calls := read_xml(body, 0) if ":invoke" in body[:MAX_HEADER] else []:  # Muse
        return calls[0]
    start = body.find("{", 0, 64)
    if start < 0:  # the built-in python tool takes plain code
        return RawCall(recipient, {"code": body} if body else None, finished)
    value = read_value(body, start)
    return RawCall(recipient, value.value, finished or value.finished)


READERS = dict.fromkeys(("<|channel|>", "<|message|>"), read)
