"""Calls in tags, be it XML or what looks like it, whatever a model or an agent calls its tags.

XML: Anthropic's <invoke name="x">, MiniMax and DeepSeek V3.2 with a prefix, and Qwen3-Coder's
<function=x><parameter=y>.

`<tool_call>` (Hermes and Qwen put JSON into it, Qwen3-Coder XML, GLM a name and its pairs), Gemma's
`call:name{...}`, Kimi K3's `<|open|>call`, and the tags of Cline and Roo Code, named after tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from continuum_connector.toolcalls.asked import MAX_CALLS, RawCall, read_each
from continuum_connector.toolcalls.json_calls import read_calls, read_value

_XML_PREFIX = r"[\w:｜|]{0,24}? ?"
_XML_OPEN = re.compile(
    rf"<{_XML_PREFIX}(?:function=|(?:invoke|function)\s{{1,8}}name\s{{0,8}}=\s{{0,8}})"
    r"[\"']?([^\"'<>\n]{1,128})[\"']?\s{0,8}>"
)
_XML_CLOSE = re.compile(rf"</{_XML_PREFIX}(?:invoke|function)>")
_XML_PARAMETER = re.compile(
    rf"<{_XML_PREFIX}param(?:eter)?(?:=|\s{{1,8}}name\s{{0,8}}=\s{{0,8}})"
    r"[\"']?([^\"'<>\n]{1,128})(?:[\"'][^<>\n]{0,64})?>"
)
_XML_PARAMETER_END = re.compile(rf"</{_XML_PREFIX}param(?:eter)?>")


def read_xml(text: str, start: int) -> list[RawCall]:
    """Read the calls from `start` on."""
    # the prefix of a tag may come before the marker
    position = max(text.rfind("<", max(0, start - 24), start + 1), 0)
    return read_each(text, position, _XML_OPEN, _read_xml_call)


def _read_xml_call(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
    """Read the call whose opening tag is `opened`; return it and where it ends."""
    position = opened.end()
    found: dict[str, object] = {}
    for _ in range(MAX_CALLS * 4):
        key = _XML_PARAMETER.search(text, position)
        end = _XML_CLOSE.search(text, position, key.start() if key else len(text))
        if end is not None or key is None:
            arguments = found or _json_body(text, opened.end())
            at = end.end() if end is not None else len(text)
            return RawCall(opened[1], arguments, end is not None), at
        close = _XML_PARAMETER_END.search(text, key.end())
        position = close.end() if close is not None else len(text)
        value_end = close.start() if close is not None else len(text)
        found[key[1]] = text[key.end() : value_end].strip("\n")
    return RawCall(opened[1], found), position


def _json_body(text: str, start: int) -> object:
    """Llama 3.1 writes <function=name>{json}</function>."""
    while start < len(text) and text[start] in " \n":
        start += 1
    return read_value(text, start).value if text[start : start + 1] == "{" else None


XML_MARKERS = ("<function=", "<invoke", ":invoke", "｜invoke", "｜ invoke", "<function name=")

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
MAX_TAGS = 2 * MAX_CALLS  # looked into, as a text about the tag may have hundreds without a call
MAX_MEMBERS = 4 * MAX_CALLS  # arguments of one call
_NAME_END = re.compile(r"[\n<{]")
_TYPE = r"(?:<arg_type>[^<]{0,64}</arg_type>\s{0,8})?"  # K2 Horizon
_PAIR = re.compile(rf"<arg_key>([^<]{{1,128}})</arg_key>\s{{0,8}}{_TYPE}<arg_value>")

_GEMMA = re.compile(r"(?:<\|tool_call>|<start_function_call>)call:([\w.\-]{1,128})\{")
_GEMMA_KEY = re.compile(r"[\s,]{0,16}(\w{1,64}):(<escape>|<\|\"\|>)?")
_GEMMA_END = re.compile(r"[,}]")

_KIMI_K3 = re.compile(
    r"<\|open\|>call [^<>\n]{0,64}?tool=\"([^\"<>\n]{1,128})\"[^<>\n]{0,64}<\|sep\|>"
)
_KIMI_K3_KEY = re.compile(
    r"<\|open\|>argument [^<>\n]{0,64}?key=\"([^\"<>\n]{1,128})\"[^<>\n]{0,64}<\|sep\|>"
)
_KIMI_K3_END = "<|close|>call<|sep|>"

# attempt_completion and ask_followup_question are left out, because they speak to a person.
AGENT_TOOLS = (
    *("execute_command", "read_file", "write_to_file", "replace_in_file", "apply_diff"),
    *("insert_content", "search_and_replace", "search_files", "list_files"),
    *("list_code_definition_names", "codebase_search", "browser_action", "use_mcp_tool"),
    *("access_mcp_resource", "fetch_instructions", "new_task", "switch_mode", "web_fetch"),
)
_AGENT_KEY = re.compile(r"\s{0,64}<([a-z_]{1,64})>")

FindKey = Callable[[str, int], "re.Match[str] | None"]
ValueEnd = Callable[[str, "re.Match[str]"], tuple[int, int]]  # end of the value, and index after it


def read_tool_call(text: str, start: int) -> list[RawCall]:
    """Read the calls of every `<tool_call>` from `start` on."""
    calls: list[RawCall] = []
    for _ in range(MAX_TAGS):
        if len(calls) >= MAX_CALLS or (start := text.find(TOOL_CALL, start)) < 0:
            break
        start += len(TOOL_CALL)
        while start < len(text) and text[start] in " \t\r\n":
            start += 1
        if text[start : start + 1] in ("{", "["):
            found, start = read_calls(text, start, sure=True)
        else:
            end, _ = _until(text, start, TOOL_CALL_END)
            found = _in_tool_call(text[start:end], end < len(text))
            start = end
        calls += found
    return calls[:MAX_CALLS]


def _in_tool_call(body: str, finished: bool) -> list[RawCall]:
    if body.startswith("<"):
        return read_xml(body, 0) or [RawCall("", finished=False)]
    end = _NAME_END.search(body)
    if end is None:
        return [RawCall(body.strip() if finished else "", None, finished)]
    pairs, _ = _members(
        body, end.start(), _PAIR.search, lambda text, key: _until(text, key.end(), "</arg_value>")
    )
    found = {key.strip(): value.strip("\n") for key, value in pairs.items()}
    return [RawCall(body[: end.start()].strip(), found or None, finished)]


def read_gemma(text: str, start: int) -> list[RawCall]:
    """Read Gemma's and FunctionGemma's calls: `call:name{key:<|"|>text<|"|>,n:3}`."""

    def value_end(text: str, key: re.Match[str]) -> tuple[int, int]:
        if key[2] is not None:
            return _until(text, key.end(), key[2])
        plain = _GEMMA_END.search(text, key.end())
        end = plain.start() if plain else len(text)
        return end, end

    def read_one(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
        found, position = _members(text, opened.end(), _GEMMA_KEY.match, value_end)
        return RawCall(opened[1], found, text[position : position + 1] == "}"), position

    return read_each(text, start, _GEMMA, read_one) or [RawCall("", finished=False)]


def read_kimi_k3(text: str, start: int) -> list[RawCall]:
    """Read calls like `<|open|>call tool="x"<|sep|><|open|>argument key="k"<|sep|>value...`."""

    def value_end(text: str, key: re.Match[str]) -> tuple[int, int]:
        return _until(text, key.end(), "<|close|>argument<|sep|>")

    def read_one(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
        found, position = _members(text, opened.end(), _KIMI_K3_KEY.match, value_end)
        finished = text.startswith(_KIMI_K3_END, position)
        return RawCall(opened[1], found or None, finished), position

    return read_each(text, start, _KIMI_K3, read_one) or [RawCall("", finished=False)]


def read_agent(text: str, start: int) -> list[RawCall]:
    """Read the tag of Cline or Roo Code at `start`; these agents make one call a turn."""
    begin = text.index(">", start) + 1
    tool = text[start + 1 : begin - 1]
    end, _ = _until(text, begin, f"</{tool}>")
    finished = end < len(text)
    found, _ = _members(
        text[begin:end],
        0,
        _AGENT_KEY.match,
        lambda text, key: _until(text, key.end(), f"</{key[1]}>"),
    )
    if not found and not finished and text[begin:].strip():
        return []  # it is prose about the tag
    name, arguments = found.get("tool_name"), found.get("arguments")
    if tool == "use_mcp_tool" and name is not None:
        if arguments is not None and arguments.strip().startswith("{"):
            value = read_value(arguments, arguments.index("{")).value
            return [RawCall(name, value, finished)]
        return [RawCall(name, arguments, finished)]
    return [RawCall(tool, found, finished)]


def _members(
    text: str, position: int, key_at: FindKey, value_end: ValueEnd
) -> tuple[dict[str, str], int]:
    """Read keys and values from `position` on; return them and where the last one ends."""
    found: dict[str, str] = {}
    for _ in range(MAX_MEMBERS):
        key = key_at(text, position)
        if key is None:
            break
        end, position = value_end(text, key)
        found[key[1]] = text[key.end() : end]
    return found, position


def _until(text: str, start: int, mark: str) -> tuple[int, int]:
    """Where `mark` begins and ends; the text's end for both if it is missing."""
    end = text.find(mark, start)
    return (end, end + len(mark)) if end >= 0 else (len(text), len(text))


READERS: dict[str, Callable[[str, int], list[RawCall]]] = {
    **dict.fromkeys(XML_MARKERS, read_xml),
    TOOL_CALL: read_tool_call,
    "<|tool_call>call:": read_gemma,
    "<start_function_call>call:": read_gemma,
    "<|open|>call ": read_kimi_k3,
    **{f"<{tool}>": read_agent for tool in AGENT_TOOLS},
}
