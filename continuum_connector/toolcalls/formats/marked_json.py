"""A marker, then JSON: Llama 3's <|python_tag|>, Phi-4-mini, Granite, Jamba, InternLM and more."""

from __future__ import annotations

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.formats import python_calls
from continuum_connector.toolcalls.formats.json_calls import read_calls

PYTHON_TAG = "<|python_tag|>"
MARKERS = (
    PYTHON_TAG,
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


def read(text: str, start: int) -> list[RawCall]:
    """Read the calls behind the marker at `start`."""
    marker = next(m for m in MARKERS if text.startswith(m, start))
    start += len(marker.removesuffix("["))
    calls, _ = read_calls(text, start, sure=True)
    if not calls:
        calls = python_calls.read(text[start:], sure=True)
    if not calls and marker == PYTHON_TAG:  # Llama's code interpreter
        code, end, _ = text[start:].partition("<|eo")
        return [RawCall("python", {"code": code}, bool(end))]
    return calls
