"""Tags named after tools: Cline, Roo Code, <execute_command><command>npm test</command>..."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.formats.json_calls import read_value

# Not among them: attempt_completion, ask_followup_question, which speak to a person.
TOOLS = (
    *("execute_command", "read_file", "write_to_file", "replace_in_file", "apply_diff"),
    *("insert_content", "search_and_replace", "search_files", "list_files"),
    *("list_code_definition_names", "codebase_search", "browser_action", "use_mcp_tool"),
    *("access_mcp_resource", "fetch_instructions", "new_task", "switch_mode", "web_fetch"),
)
MARKERS = tuple(f"<{tool}>" for tool in TOOLS)
_PARAMETER = re.compile(r"\s{0,64}<([a-z_]{1,64})>")


def read(text: str, start: int) -> list[RawCall]:
    """Read the call whose tag is at `start`; these agents make one call a turn."""
    end = text.index(">", start) + 1
    tool = text[start + 1 : end - 1]
    close = text.find(f"</{tool}>", end)
    body = text[end : close if close >= 0 else len(text)]
    found: dict[str, object] = {}
    position = 0
    for _ in range(MAX_CALLS):
        key = _PARAMETER.match(body, position)
        if key is None:
            break
        value_end = body.find(f"</{key[1]}>", key.end())
        position = len(body) if value_end < 0 else value_end + len(key[1]) + 3
        found[key[1]] = body[key.end() : value_end if value_end >= 0 else len(body)]
    if not found and close < 0 and body.strip():
        return []  # prose about the tag
    name = found.get("tool_name")
    if tool == "use_mcp_tool" and isinstance(name, str):
        return [RawCall(name, _json(found.get("arguments")), close >= 0)]
    return [RawCall(tool, found, close >= 0)]


def _json(arguments: object) -> object:
    if not isinstance(arguments, str) or not arguments.strip().startswith("{"):
        return arguments
    return read_value(arguments, arguments.index("{")).value
