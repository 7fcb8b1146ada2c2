"""Calls between special tokens, name first, then JSON: DeepSeek V3, R1, V3.1, and Kimi K2."""

from __future__ import annotations

from dataclasses import dataclass

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_value


@dataclass(frozen=True)
class Dialect:
    """The special tokens around a call, and between its name and its arguments."""

    begin: str
    between: str
    end: str


DEEPSEEK = Dialect("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = Dialect("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
MARKERS = (DEEPSEEK.begin, KIMI.begin)


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    dialect = DEEPSEEK if text.startswith(DEEPSEEK.begin, start) else KIMI
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (start := text.find(dialect.begin, start)) >= 0:
        start += len(dialect.begin)
        call, start = _read_one(text, start, dialect)
        calls.append(call)
    return calls


def _read_one(text: str, start: int, dialect: Dialect) -> tuple[RawCall, int]:
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
