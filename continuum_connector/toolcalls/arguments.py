"""Turns a call as the model wrote it into what statistics use: names and argument classes.

A tool that runs a shell is read as the commands in its script.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.toolcalls.asked import MAX_ARGUMENTS, MAX_CALLS, ToolCall, clean_name
from continuum_connector.toolcalls.shell import SHELLS, joined, octave, seconds
from continuum_connector.toolcalls.shell import calls_of as shell_calls

SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
SHELL_TOOLS = {*SHELLS, "shell", "terminal"}  # where the arguments are a text without keys
NO_SHELL_KEYS = {"path", "file_path", "file_text", "old_str"}  # an editor has commands, too
SECONDS_KEYS = ("timeout", "seconds", "duration", "sleep", "wait", "timeout_s")
MAX_SIZED = 32  # members whose size is looked at
_WORD = re.compile(r"[a-z][a-z_\-]{0,23}")
_KEY = re.compile(r"\w{1,24}")


def classified(raw: RawCall) -> list[ToolCall]:
    """The calls of a raw call; none if it has no name yet."""
    name = clean_name(raw.name)
    arguments = raw.arguments
    if isinstance(arguments, str) and name.lower() in SHELL_TOOLS:
        arguments = {"command": arguments}
    if not isinstance(arguments, dict):
        size = len(arguments) if isinstance(arguments, str) else 0
        return [ToolCall(name, octave(size) if size else "")] if name else []
    script = _script(name, arguments)
    if script is not None:
        return shell_calls(script) or ([ToolCall(name)] if name else [])
    return [ToolCall(name, _members(arguments))] if name else []


def _script(name: str, arguments: dict[str, object]) -> str | None:
    """The shell script among the arguments, if there is one."""
    if "edit" in name or NO_SHELL_KEYS & arguments.keys():
        return None
    for key in SCRIPT_KEYS:
        value = arguments.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # argv, as Codex sends it: ["bash", "-lc", "pytest -q"]
            words = [word for word in value[:64] if isinstance(word, str)]
            if len(words) > 2 and words[0].rsplit("/", 1)[-1] in SHELLS and words[1][:1] == "-":
                return words[2]
            return " ".join(words)
    return None


def _members(arguments: dict[str, object]) -> str:
    """Sorted keys, what an editor is told to do, time limits, and the octave of the size."""
    keys = sorted(key for key in list(arguments)[:MAX_SIZED] if _KEY.fullmatch(key))
    parts = [",".join(keys)[: MAX_ARGUMENTS - 24]] if keys else []
    command = arguments.get("command")
    if isinstance(command, str) and _WORD.fullmatch(command):
        parts.append(command)
    for key in SECONDS_KEYS:
        limit = _limit(arguments.get(key))
        if limit is not None:
            parts.append(f"{key}{octave(limit)}")
            break
    if arguments:
        parts.append(octave(_size(arguments)))
    return joined(parts)


def _limit(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(min(max(value, 0), 1e9))
    return seconds(value) if isinstance(value, str) else None


def _size(arguments: dict[str, object]) -> int:
    """Characters of the values; of what nests, the number of its members."""
    size = 0
    for value in list(arguments.values())[:MAX_SIZED]:
        size += len(value) if isinstance(value, str | list | dict) else 4
    return size


ReadOne = Callable[[str, "re.Match[str]"], "tuple[RawCall, int]"]  # the call, and where it ends


@dataclass(frozen=True)
class RawCall:
    """A call in the text. `arguments`: a dict where the format has keys, else text or None.

    `name` is "" where there is none: it is not there yet, or a format's only tool is a shell.
    `finished` is False if the text ends inside the call.
    """

    name: str
    arguments: object = None
    finished: bool = True


def read_each(text: str, start: int, opener: re.Pattern[str], read_one: ReadOne) -> list[RawCall]:
    """Read a call at each opener from `start` on, the next behind the end of the last."""
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (opened := opener.search(text, start)):
        call, start = read_one(text, opened)
        calls.append(call)
    return calls
