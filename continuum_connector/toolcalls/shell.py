"""The calls of a shell script: the commands in it that take time.

The first word names a command. `cd`, assignments and the like are dropped where something
else is there, wrappers (`sudo`, `timeout 60`, `uv run`, `bash -c "..."`) stand for what they
run, and the filters behind a pipe for nothing: they take as long as what feeds them.
"""

from __future__ import annotations

import re

from continuum_connector.toolcalls.asked import MAX_CALLS, ToolCall, clean_name
from continuum_connector.toolcalls.shell_arguments import argument_class
from continuum_connector.toolcalls.shell_names import (
    BEFORE,
    FILTERS,
    INSTANT,
    INSTEAD,
    RUNNER_VALUES,
    RUNNERS,
    SHELLS,
    WRAPPERS,
)
from continuum_connector.toolcalls.shell_words import Command, commands_of

MAX_DEPTH = 3  # of bash -c "bash -c ..."
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]{0,64}\])?\+?=")
_PYTHON = re.compile(r"(python|pip|pypy)[\d.]+$")


def calls_of(script: str, depth: int = 0) -> list[ToolCall]:
    """The calls of a script, in order; if nothing in it takes time, what it begins with."""
    calls: list[ToolCall] = []
    instant: list[ToolCall] = []
    for command in commands_of(script):
        for call, counts in _calls_of(command, depth):
            (calls if counts else instant).append(call)
        if len(calls) >= MAX_CALLS:
            break
    # What a script ends with is what it is for: `export A=1; echo $A`.
    return calls[:MAX_CALLS] or instant[-1:]


def _calls_of(command: Command, depth: int) -> list[tuple[ToolCall, bool]]:
    """The calls of one simple command, each with whether it takes time."""
    words, wrapped = _unwrapped(command.words)
    if not words:
        return []
    name = _name(words[0])
    if (script := _inner_script(name, words)) is not None and depth < MAX_DEPTH:
        return [(call, True) for call in calls_of(script, depth + 1)]
    if name == "python" and "-m" in words[1:3] and len(words) > (at := words.index("-m") + 1):
        name, words = _name(words[at]), words[at:]
    if not name:
        return []
    call = ToolCall(name, argument_class(name, words[1:], command.reads_heredoc))
    counts = name not in INSTANT and not (command.piped and not wrapped and name in FILTERS)
    return [(call, counts)]


def _unwrapped(words: list[str]) -> tuple[list[str], bool]:
    """Leave out what stands before the command; say whether it was a wrapper."""
    at, wrapped = 0, False
    while at < len(words):
        word = words[at]
        name = word.rsplit("/", 1)[-1]
        if word in BEFORE or _ASSIGNMENT.match(word):
            at += 1
        elif word in INSTEAD:
            return [], False
        elif name in WRAPPERS and at + 1 < len(words):
            values, positional = WRAPPERS[name]
            behind = _behind_options(words, at + 1, values) + positional
            if behind >= len(words):
                return words[at:], wrapped
            at, wrapped = behind, True
        elif name in RUNNERS and words[at + 1 : at + 2] in (["run"], ["exec"]):
            behind = _behind_options(words, at + 2, RUNNER_VALUES)
            if behind >= len(words):
                return words[at:], wrapped
            at, wrapped = behind, True
        else:
            return words[at:], wrapped
    return [], wrapped


def _behind_options(words: list[str], at: int, values: frozenset[str]) -> int:
    while at < len(words) and (words[at].startswith("-") or _ASSIGNMENT.match(words[at])):
        at += 2 if words[at] in values else 1
    return at


def _inner_script(name: str, words: list[str]) -> str | None:
    """The script of `bash -lc "..."` or `eval "..."`."""
    if name == "eval":
        return " ".join(words[1:])
    if name in SHELLS:
        for at, word in enumerate(words[1:4], 1):
            if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
                return words[at + 1] if at + 1 < len(words) else None
    return None


def _name(word: str) -> str:
    """A command's name: no folder, no version of Python; "" if it is none."""
    name = clean_name(word.rstrip("/").rsplit("/", 1)[-1]) if word not in (".", "[", ":") else word
    return _PYTHON.sub(r"\1", name)
