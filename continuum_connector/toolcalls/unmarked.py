"""Calls that no marker announces: shell blocks in fences, a message that is JSON, ReAct's actions,
Python-style calls.

JSON is Llama 3's call without its tag, or what Terminal-Bench's agent types into its terminal:
{"commands": [{"keystrokes": "ls\\n", "duration": 0.1}]}. Python-style is a list,
[get_weather(city="Paris"), get_time()], or one call a line.
"""

from __future__ import annotations

import re
from itertools import islice

from continuum_connector.toolcalls.asked import MAX_CALLS, RawCall
from continuum_connector.toolcalls.json_calls import read_calls, read_value

SHELLS = ("bash", "sh", "shell", "mswea_bash_command")
FENCE = re.compile(rf"```(?:{'|'.join(SHELLS)})[ \t]{{0,8}}(?:\n|$)")
_FENCE_END = re.compile(r"\n[ \t]{0,8}```")

_JSON = re.compile(r"[{\[](?=[\s\"{\[])")
MAX_INDENT = 8
MAX_BRACKETS = 256  # that we look at
MAX_TRIES = 4  # because prose may have other JSON before the call
MAX_WAIT_S = 3600.0  # for one command in a terminal

_ACTION = re.compile(r"Action(?: \d{1,3})?:[ \t*]{0,8}([\w.\-]{1,128})")
_ACTION_INPUT = re.compile(r"[ \t*]{0,8}\n[ \t*]{0,8}Action Input(?: \d{1,3})?:[ \t*]{0,8}")
_OBSERVATION = "\nObservation"  # the model invents whatever follows


def read_block(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
    """Read the block that `opened` opens; return it and where it ends.

    The first line that begins with three backticks ends it, as in mini-swe-agent, even
    inside a heredoc.
    """
    begin = opened.end() - 1 if text[opened.end() - 1 : opened.end()] == "\n" else opened.end()
    close = _FENCE_END.search(text, begin)
    end = close.start() if close is not None else len(text)
    call = RawCall("", {"command": text[begin:end]}, close is not None)
    return call, close.end() if close is not None else len(text)


def read_unmarked(text: str) -> list[RawCall]:
    """Read the calls of a text that has no marker and no shell block: JSON, ReAct, or Python."""
    text = text.strip()
    for end in ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "</s>"):
        text = text.removesuffix(end).rstrip()
    return read_json(text) or read_react(text) or read_python(text, sure=False)


def read_json(text: str) -> list[RawCall]:
    """Read the calls of the first JSON that has any."""
    position = num_tries = 0
    for begins in islice(_JSON.finditer(text), MAX_BRACKETS):
        start = begins.start()
        if start < position or not _begins_line(text, start):
            continue
        value = read_value(text, start)
        if isinstance(value.value, dict) and isinstance(value.value.get("commands"), list):
            return _terminal_calls(value.value, value.finished)
        calls, _ = read_calls(text, start, sure=False)
        if calls:
            return calls
        position = value.end
        num_tries += 1
        if num_tries == MAX_TRIES:
            break
    return []


def _begins_line(text: str, start: int) -> bool:
    """Whether there are only a few blanks before `start` in its line."""
    first = max(0, start - MAX_INDENT)
    before = text[first:start].rstrip(" \t")
    return before.endswith("\n") or (not before and first == 0)


def _terminal_calls(value: dict[str, object], finished: bool) -> list[RawCall]:
    """The calls in a message to a terminal; none if it says that the task is done.

    `duration`: how many seconds the agent leaves the terminal alone after the keys. That is a
    sleep, whatever runs in the terminal.
    """
    commands = value["commands"]
    assert isinstance(commands, list)
    items = [item for item in commands[:MAX_CALLS] if isinstance(item, dict)]
    keys = [item.get("keystrokes") for item in items]
    calls = [RawCall("", {"command": key}, finished) for key in keys if isinstance(key, str)]
    if not calls:
        done = value.get("task_complete") is True or not finished
        return [] if done else [_sleep(0.0, finished)]
    waits = [item.get("duration") for item in items]
    wait_s = sum(min(wait, MAX_WAIT_S) for wait in waits if isinstance(wait, int | float))
    return [*calls[: MAX_CALLS - 1], _sleep(wait_s, finished)] if wait_s >= 1 else calls


def _sleep(duration_s: float, finished: bool) -> RawCall:
    return RawCall("", {"command": f"sleep {duration_s:.3f}"}, finished)


def read_react(text: str) -> list[RawCall]:
    """Read the first action, because an agent runs only one. An action without an input is
    prose."""
    for action in _ACTION.finditer(text):
        line = text[max(0, action.start() - 8) : action.start()].rstrip(" \t*")
        if line and not line.endswith("\n"):
            continue
        if given := _ACTION_INPUT.match(text, action.end()):
            return [_action(action[1], text, given.end())]
    return []


def _action(name: str, text: str, start: int) -> RawCall:
    if text[start : start + 1] == "{":
        value = read_value(text, start)
        return RawCall(name, value.value, value.finished)
    end = text.find(_OBSERVATION, start)
    return RawCall(name, text[start : end if end >= 0 else len(text)].strip(), end >= 0)


_HEAD = re.compile(r"[\s,;]{0,64}([A-Za-z_][\w.]{0,127})\(")
_PYTHON_TOKEN = re.compile(
    r"\"(?:[^\"\\]+|\\.)*(\")?|'(?:[^'\\]+|\\.)*(')?|([()\[\]{},])", re.DOTALL
)
_KEY = re.compile(r"\s{0,16}([A-Za-z_]\w{0,63})\s{0,16}=(?!=)\s{0,16}")
_OPENING = "([{"
MAX_PYTHON_TOKENS = 512  # strings, brackets and commas of one call


def read_python(text: str, sure: bool) -> list[RawCall]:
    """Read a text that consists of calls only.

    `sure`: a marker or a `[` says that they are calls. Without one, each must name its parameters,
    because `print(x)` is prose about code.
    """
    text = text.strip()
    listed = text.startswith("[")
    position = 1 if listed else 0
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (head := _HEAD.match(text, position)):
        call, position = _read_python_call(text, head)
        if not isinstance(call.arguments, dict) or not (call.arguments or sure or listed):
            return []
        calls.append(call)
    rest = text[position : position + 32].lstrip()
    if not calls or (rest and rest[0] not in ",]<" and len(calls) < MAX_CALLS and not sure):
        return []
    return calls


def _read_python_call(text: str, head: re.Match[str]) -> tuple[RawCall, int]:
    """Read one call up to its `)`. With positional arguments, `arguments` is a text, not a dict."""
    depth, begin = 1, head.end()
    parts: list[str] = []
    for token in islice(_PYTHON_TOKEN.finditer(text, head.end()), MAX_PYTHON_TOKENS):
        mark = token[3]
        if mark is None:
            continue
        if mark in _OPENING:
            depth += 1
        elif mark == ",":
            if depth == 1:
                parts.append(text[begin : token.start()])
                begin = token.end()
        else:
            depth -= 1
        if depth == 0:
            parts.append(text[begin : token.start()])
            return RawCall(head[1], _arguments(parts)), token.end()
    parts.append(text[begin:])
    return RawCall(head[1], _arguments(parts), finished=False), len(text)


def _arguments(parts: list[str]) -> object:
    found: dict[str, object] = {}
    for part in parts:
        key = _KEY.match(part)
        if key is None:
            if part.strip():
                return ",".join(parts)
            continue
        found[key[1]] = _literal(part[key.end() :].strip())
    return found


def _literal(value: str) -> object:
    if value[:1] in ("'", '"'):
        return value[1:].removesuffix(value[0])
    try:
        return float(value[:32])
    except ValueError:
        return value
