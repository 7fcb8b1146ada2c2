"""RawCall: a call as the model wrote it, and the names of what it runs.

A tool that runs a shell is read as the commands in its script.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.toolcalls.asked import MAX_CALLS, clean_name
from continuum_connector.toolcalls.shell import SHELLS, commands_that_take_time

SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
SHELL_TOOLS = {*SHELLS, "shell", "terminal"}  # where the arguments are a text without keys
NO_SHELL_KEYS = {"path", "file_path", "file_text", "old_str"}  # an editor has commands, too

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


def tools_of(raw: RawCall) -> list[str]:
    """The names of what a call runs; none if it has no name yet."""
    name = clean_name(raw.name)
    script = _script(name, raw.arguments)
    commands = commands_that_take_time(script) if script is not None else []
    return commands or ([name] if name else [])


def _script(name: str, arguments: object) -> str | None:
    """The shell script among the arguments, if there is one."""
    if isinstance(arguments, str):
        return arguments if name.lower() in SHELL_TOOLS else None
    if not isinstance(arguments, dict) or "edit" in name or NO_SHELL_KEYS & arguments.keys():
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


def read_each(text: str, start: int, opener: re.Pattern[str], read_one: ReadOne) -> list[RawCall]:
    """Read a call at each opener from `start` on, the next behind the end of the last."""
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (opened := opener.search(text, start)):
        call, start = read_one(text, opened)
        calls.append(call)
    return calls
