"""A special token of the model's, then a call: JSON, a name and JSON, or Python.

DeepSeek V3, R1, V3.1 and Kimi K2 put tokens around the name. Mistral writes [TOOL_CALLS][{...}],
since its v11 tokenizer [TOOL_CALLS]name[ARGS]{...}. The rest writes one marker, then all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats import python_calls
from continuum_connector.toolcalls.formats.json_calls import read_calls, read_value
from continuum_connector.toolcalls.raw_calls import RawCall

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
    """Read the calls behind the one marker at `start`."""
    marker = next(m for m in MARKERS if text.startswith(m, start))
    start += len(marker.removesuffix("["))
    calls, _ = read_calls(text, start, sure=True)
    if not calls:
        calls = python_calls.read(text[start:], sure=True)
    if not calls and marker == PYTHON_TAG:  # Llama's code interpreter
        code, end, _ = text[start:].partition("<|eo")
        return [RawCall("python", {"code": code}, bool(end))]
    return calls


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


READERS: dict[str, Callable[[str, int], list[RawCall]]] = {
    **dict.fromkeys(MARKERS, read_marked),
    MISTRAL: read_mistral,
    DEEPSEEK.begin: read_sections,
    KIMI.begin: read_sections,
}
