"""ReAct: `Action: tool` and `Action Input: ...` on lines of their own, or `Action: tool[input]`."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.formats.json_calls import read_value

_ACTION = re.compile(r"Action(?: \d{1,3})?:[ \t*]{0,8}([\w.\-]{1,128})")
_BRACKETS = re.compile(r"\[([^\]\n]{0,4096})\][ \t]{0,8}(?:\n|$)")
_INPUT = re.compile(r"[ \t*]{0,8}\n[ \t*]{0,8}Action Input(?: \d{1,3})?:[ \t*]{0,8}")
_STOP = "\nObservation"  # what comes behind it, the model made up


def read(text: str) -> list[RawCall]:
    """Read the first action, for an agent runs no more. An action without an input is prose."""
    for action in _ACTION.finditer(text):
        line = text[max(0, action.start() - 8) : action.start()].rstrip(" \t*")
        if line and not line.endswith("\n"):
            continue
        if bracketed := _BRACKETS.match(text, action.end()):
            return [RawCall(action[1], bracketed[1])]
        if given := _INPUT.match(text, action.end()):
            return [_with_input(action[1], text, given.end())]
    return []


def _with_input(name: str, text: str, start: int) -> RawCall:
    if text[start : start + 1] == "{":
        value = read_value(text, start)
        return RawCall(name, value.value, value.finished)
    end = text.find(_STOP, start)
    return RawCall(name, text[start : end if end >= 0 else len(text)].strip(), end >= 0)
