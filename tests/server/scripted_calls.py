"""vLLM's tool parser for tests of clients: it reads a tool call into every answer but the last.

A model of random weights calls no tools and ends no answer, so somebody must say when it does. Here
it is the server (`--tool-parser-plugin`), so that every request is the client's own: body, headers,
tool loop. The answer's text stays as it is beside the call, and is sent again with the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

CALLS = 2  # an agent has one turn more
VALUE = "README.md"  # of every argument
ANSWER = StructuredOutputsParams(regex="( [a-z]{4}){64}")  # of the tiny tokenizer's words


@ToolParserManager.register_module("scripted")
class ScriptedCalls(ToolParser):
    """The first tool of the request, until its history holds enough results."""

    def adjust_request(self, request: Any) -> Any:
        """Its answer has an end."""
        request.structured_outputs = ANSWER
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        tool = next(iter(request.tools or ()), None)
        if tool is None or _results(request) >= CALLS:
            return ExtractedToolCallInformation(
                tools_called=False, tool_calls=[], content=model_output
            )
        function = getattr(tool, "function", tool)  # of chats; of responses
        arguments = dict.fromkeys((function.parameters or {}).get("properties", {}), VALUE)
        call = FunctionCall(name=function.name, arguments=json.dumps(arguments))
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=[ToolCall(function=call)], content=model_output
        )


def _results(request: Any) -> int:
    """How many tool results the request brings with it."""
    history = getattr(request, "messages", None) or getattr(request, "input", ())
    return sum(_is_result(_plain(each)) for each in history)


def _plain(message: Any) -> Mapping[str, Any]:
    return message if isinstance(message, Mapping) else message.model_dump()


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or message.get("type") == "function_call_output"
