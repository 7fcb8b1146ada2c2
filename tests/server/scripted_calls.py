"""vLLM's tool parser for tests of clients: it reads a tool call into every answer but the last.

A model of random weights calls no tools and ends no answer, so somebody must say when it does. Here
it is the server (`--tool-parser-plugin`), so that every request is the client's own: body, headers,
tool loop. The answer's text stays as it is beside the call, and is sent again with the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

CALLS = 2  # an agent has one turn more
VALUE = "README.md"  # of every argument that is a string, but a command
COMMAND = "cat README.md"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent ends; nothing else does
SHELLS = ("Bash", "bash", "exec_command", "shell_command", "terminal")  # each client's own
WORDS, LETTERS = 64, 5  # of an answer; of a word of the tiny tokenizer, with its space
ANSWER = StructuredOutputsParams(regex=f"( [a-z]{{{LETTERS - 1}}}){{{WORDS}}}")


@ToolParserManager.register_module("scripted")
class ScriptedCalls(ToolParser):
    """The shell of the request, else its first tool, until its history holds enough results."""

    def adjust_request(self, request: Any) -> Any:
        """Its answer has an end, if it may call a tool."""
        if request.tools:
            request.structured_outputs = ANSWER
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        call = _call(request)
        return ExtractedToolCallInformation(
            tools_called=call is not None,
            tool_calls=[ToolCall(function=call)] if call else [],
            content=model_output,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any,
        current_token_ids: Any,
        delta_token_ids: Any,
        request: Any,
    ) -> DeltaMessage | None:
        """The text as it comes; with its last word the call, whole."""
        delta = DeltaMessage(content=delta_text) if delta_text else None
        is_whole = delta_text and len(current_text) >= LETTERS * WORDS
        if not is_whole or (call := _call(request)) is None:
            return delta
        self.prev_tool_call_arr = [{"name": call.name, "arguments": call.arguments}]
        self.streamed_args_for_tool = [call.arguments]
        function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
        made = DeltaToolCall(id=f"call_{uuid4().hex}", type="function", index=0, function=function)
        return DeltaMessage(content=delta_text, tool_calls=[made])


def _call(request: Any) -> FunctionCall | None:
    """What the answer to this request calls; None: it is the last one, or there is no tool."""
    functions = [getattr(tool, "function", tool) for tool in request.tools or ()]
    named = {each.name: each for each in functions if getattr(each, "name", None)}
    is_last = _results(request) >= CALLS
    command = SUBMIT if is_last and SUBMIT in _first_words(request) else COMMAND
    if not named or (is_last and command == COMMAND):
        return None
    name = next((each for each in SHELLS if each in named), next(iter(named)))
    schema = named[name].parameters or {}
    properties = schema.get("properties", {})
    wanted = schema.get("required") or properties
    arguments = {each: properties.get(each, {}).get("enum", [VALUE])[0] for each in wanted}
    arguments |= {each: command for each in ("command", "cmd") if each in wanted}
    return FunctionCall(name=name, arguments=json.dumps(arguments))


def _results(request: Any) -> int:
    """How many tool results the request brings with it."""
    return sum(_is_result(_plain(each)) for each in _history(request))


def _first_words(request: Any) -> str:
    """What the agent was told."""
    return " ".join(str(_plain(each).get("content")) for each in _history(request)[:2])


def _history(request: Any) -> Sequence[Any]:
    found = getattr(request, "messages", None) or getattr(request, "input", ())
    return [] if isinstance(found, str) else list(found)


def _plain(message: Any) -> Mapping[str, Any]:
    return message if isinstance(message, Mapping) else message.model_dump()


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or message.get("type") == "function_call_output"
