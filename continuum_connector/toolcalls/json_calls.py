"""Calls as JSON objects: which member is the name, which are the arguments."""

from __future__ import annotations

from continuum_connector.toolcalls.asked import MAX_CALLS
from continuum_connector.toolcalls.json_text import read_value
from continuum_connector.toolcalls.raw_call import RawCall

NAMES = ("name", "tool_name", "function", "tool", "recipient_name")
ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "kwargs")
_BETWEEN = " \t\r\n;,"


def read_calls(text: str, start: int, sure: bool) -> tuple[list[RawCall], int]:
    """Read JSON calls from `start`, one after the other; return them and where they end.

    `sure`: a marker says that they are calls. Without one, an object must have a name and
    arguments to be one.
    """
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS:
        while start < len(text) and text[start] in _BETWEEN:
            start += 1
        if text[start : start + 1] not in ("{", "["):
            break
        value = read_value(text, start)
        found = calls_of(value.value, sure, value.finished)
        start = value.end
        if not found:
            if sure and not value.finished:  # a call has begun, and its name is not known yet
                calls.append(RawCall("", finished=False))
            break
        calls += found
    return calls[:MAX_CALLS], start


def calls_of(value: object, sure: bool, finished: bool = True) -> list[RawCall]:
    """The calls in a JSON value: one object, a list, OpenAI's {"function": ...} or "tool_calls"."""
    if isinstance(value, list):
        each = [call for item in value[:MAX_CALLS] for call in calls_of(item, sure)]
        return [*each[:-1], RawCall(each[-1].name, each[-1].arguments, finished)] if each else []
    if not isinstance(value, dict):
        return []
    inner = value.get("tool_calls") or value.get("function")
    if isinstance(inner, list | dict):
        return calls_of(inner, sure, finished) if _is_flat(inner) else []
    name = next((value[key] for key in NAMES if isinstance(value.get(key), str)), None)
    key = next((key for key in ARGUMENTS if key in value), None)
    if name is None:
        return _named_by_key(value, finished) if sure else []
    if key is None:
        if not sure:
            return []
        rest = {k: v for k, v in value.items() if k not in (*NAMES, "type", "id")}
        return [RawCall(name, rest or None, finished)]
    return [RawCall(name, _decoded(value[key]), finished)]


def _is_flat(value: object) -> bool:
    """Calls lie at most two objects deep; what nests further is no call, and could be endless."""
    items = value if isinstance(value, list) else [value]
    for item in items[:MAX_CALLS]:
        inner = item.get("tool_calls") or item.get("function") if isinstance(item, dict) else item
        if isinstance(inner, dict):
            inner = inner.get("tool_calls") or inner.get("function")
        if isinstance(inner, list | dict):
            return False
    return True


def _named_by_key(value: dict[str, object], finished: bool) -> list[RawCall]:
    """{"get_weather": {"city": ...}}, as Apertus writes it."""
    if len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, dict):
            return [RawCall(name, arguments, finished)]
    return []


def _decoded(arguments: object) -> object:
    """OpenAI's arguments are JSON in a string."""
    if isinstance(arguments, str):
        start = len(arguments) - len(arguments.lstrip())
        if arguments[start : start + 1] == "{":
            return read_value(arguments, start).value
    return arguments
