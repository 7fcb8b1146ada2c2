"""A special token of the model's, then a call: JSON, a name and JSON, or Python.

DeepSeek V3, R1, V3.1 and Kimi K2 put tokens around the name. Mistral writes [TOOL_CALLS][{...}],
since its v11 tokenizer [TOOL_CALLS]name[ARGS]{...}. The rest writes one marker, then all of it.

Harmony, gpt-oss' format, writes messages with a channel, and for a call a recipient.
`<|channel|>analysis` is thinking, `final` is for a person; `to=functions.x` in a header makes
the message a call, on whichever channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from continuum_connector.toolcalls.asked import MAX_CALLS, RawCall
from continuum_connector.toolcalls.json_calls import read_calls, read_value
from continuum_connector.toolcalls.tags import read_xml
from continuum_connector.toolcalls.unmarked import read_python

PYTHON_TAG = "<|python_tag|>"
MARKERS = (
    PYTHON_TAG,  # Llama 3
    "functools[",  # Phi-4-mini
    "<|tool_call|>",  # Granite 3
    "<function_call>",  # Granite 20B
    "<tool_calls>",  # Jamba, Hunyuan
    "<|action_start|><|plugin|>",  # InternLM 2
    "<|tools_prefix|>",  # Apertus
    "<longcat_tool_call>",
    "<|tool_call_start|>",  # LFM2, python-style
    "<TOOLCALL>",  # Nemotron
    "<|START_ACTION|>",  # Cohere
    "<|content_invoke_tool_json|>",  # Inkling
    "<|function_call|>",  # GigaChat 3
    "<|python_start|>",  # Llama 4, python-style
    "<function_calls>",  # Olmo 3, python-style
)


def read_marked(text: str, start: int) -> list[RawCall]:
    """Read the calls after the marker at `start`, and after each that follows: LongCat and Granite
    20B write one before every call."""
    marker = next(m for m in MARKERS if text.startswith(m, start))
    calls: list[RawCall] = []
    while start >= 0 and len(calls) < MAX_CALLS:
        found, end = _after_marker(text, start + len(marker.removesuffix("[")), marker)
        calls += found
        start = text.find(marker, end)
    return calls[:MAX_CALLS]


def _after_marker(text: str, start: int, marker: str) -> tuple[list[RawCall], int]:
    """Read the calls after one marker; return them and from where on the next may follow."""
    calls, end = read_calls(text, start, sure=True)
    if not calls:
        calls, end = read_python(text[start:], sure=True), start
    if not calls and marker == PYTHON_TAG:  # Llama's code interpreter
        code, closed, _ = text[start:].partition("<|eo")
        return [RawCall("python", {"code": code}, bool(closed))], len(text)
    return calls, end


MISTRAL = "[TOOL_CALLS]"
_NAME = re.compile(r"\s{0,8}([\w.\-]{1,128})(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)")
_NAME_ONLY = re.compile(r"\s{0,8}([\w.\-]{1,128})\[(?:ARGS|CALL_ID)\]")


def read_mistral(text: str, start: int) -> list[RawCall]:
    """Read Mistral's calls from `start` on."""
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (start := text.find(MISTRAL, start)) >= 0:
        start += len(MISTRAL)
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


@dataclass(frozen=True)
class Dialect:
    """The special tokens around a call, and between its name and its arguments."""

    begin: str
    between: str
    end: str


DEEPSEEK = Dialect("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = Dialect("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")


def read_sections(text: str, start: int) -> list[RawCall]:
    """Read the calls of DeepSeek or Kimi K2 from `start` on."""
    dialect = DEEPSEEK if text.startswith(DEEPSEEK.begin, start) else KIMI
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (start := text.find(dialect.begin, start)) >= 0:
        start += len(dialect.begin)
        call, start = _read_section(text, start, dialect)
        calls.append(call)
    return calls


def _read_section(text: str, start: int, dialect: Dialect) -> tuple[RawCall, int]:
    between = text.find(dialect.between, start)
    if between < 0:
        return RawCall("", finished=False), len(text)
    name = text[start:between].strip()
    start = between + len(dialect.between)
    if name == "function":  # V3 and R1: function<sep>name, then JSON in a fence
        line_end = text.find("\n", start)
        if line_end < 0:
            return RawCall("", finished=False), len(text)
        name, start = text[start:line_end].strip(), line_end
    end = text.find(dialect.end, start)
    brace = text.find("{", start, end if end >= 0 else len(text))
    if brace < 0:
        return RawCall(name, None, end >= 0), end if end >= 0 else len(text)
    value = read_value(text, brace)
    return RawCall(name, value.value, value.finished), value.end


HARMONY_MARKERS = ("<|channel|>", "<|message|>")
_HARMONY_TOKEN = re.compile(r"<\|(start|end|call|return|message|eom|eot)\|>")
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")
_NO_TOOL = ("self", "user", "commentary", "developer")  # to whom Muse thinks and speaks
MAX_HEADER = 256  # characters
MAX_HARMONY_TOKENS = 8 * MAX_CALLS  # of harmony's; a message has three
_RECIPIENT = re.compile(r" to=([\w.\-]{1,128})")


def read_harmony(text: str, start: int) -> list[RawCall]:
    """Read the calls of every message; a recipient may stand before the marker at `start`."""
    calls: list[RawCall] = []
    header_at, recipient, body_at = max(0, start - MAX_HEADER), "", -1
    for token in islice(_HARMONY_TOKEN.finditer(text, header_at), MAX_HARMONY_TOKENS):
        if token[1] == "message":
            header_at = max(header_at, token.start() - MAX_HEADER)
            found = _recipient(text, header_at, token.start())
            recipient, body_at = (found[1] if found else ""), token.end()
            continue
        if recipient and body_at >= 0:
            calls.append(_harmony_call(recipient, text[body_at : token.start()], True))
        header_at, recipient, body_at = token.end(), "", -1
        if len(calls) >= MAX_CALLS:
            return calls
    if recipient:
        calls.append(_harmony_call(recipient, text[body_at:], False))
    elif body_at < 0 and (found := _recipient(text, header_at, len(text))):
        whole = found.end() < len(text)  # else the text may end inside the name
        calls.append(RawCall(found[1] if whole else "", finished=False))
    return calls


def is_thinking(text: str) -> bool:
    """Whether the text ends inside the analysis channel."""
    last = text.rfind("<|channel|>")
    return text.startswith("<|channel|>analysis", last) and not _MESSAGE_END.search(text, last)


def _recipient(text: str, start: int, end: int) -> re.Match[str] | None:
    at = text.find(" to=", start, end)
    found = _RECIPIENT.match(text, at, end) if at >= 0 else None
    return None if found is None or found[1] in _NO_TOOL else found


def _harmony_call(recipient: str, body: str, finished: bool) -> RawCall:
    if calls := read_xml(body, 0) if ":invoke" in body[:MAX_HEADER] else []:  # Muse
        return calls[0]
    start = body.find("{", 0, 64)
    if start < 0:  # the built-in python tool takes plain code
        return RawCall(recipient, {"code": body} if body else None, finished)
    value = read_value(body, start)
    return RawCall(recipient, value.value, finished or value.finished)


READERS: dict[str, Callable[[str, int], list[RawCall]]] = {
    **dict.fromkeys(MARKERS, read_marked),
    **dict.fromkeys(HARMONY_MARKERS, read_harmony),
    MISTRAL: read_mistral,
    DEEPSEEK.begin: read_sections,
    KIMI.begin: read_sections,
}
