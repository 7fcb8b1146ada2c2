"""The class of a command's arguments: subcommand, flags, whether a path is given, how long.

`pytest -q tests/unit` and `pytest -q tests/vllm` are one class, `pytest` another: what only
one program would say (names, patterns, messages) is left out.
"""

from __future__ import annotations

import re

from continuum_connector.toolcalls.asked import MAX_ARGUMENTS
from continuum_connector.toolcalls.shell_names import SUBCOMMANDS, TWO_DEEP
from continuum_connector.toolcalls.sizes import octave, seconds

MAX_FLAGS = 6
_SUBCOMMAND = re.compile(r"[a-z][a-z0-9:_\-]{0,23}")
_FLAG = re.compile(r"(-[A-Za-z]{1,4}|--[A-Za-z][\w\-]{0,23}?)\d{0,4}")  # -j8 is -j
_NUMBER_FLAG = re.compile(r"-\d+")
_PATH = re.compile(r".*[/*].*|\.{1,2}|[^\s]*\.[A-Za-z]\w{0,7}", re.DOTALL)
_SENTINEL = re.compile(r"[A-Z][A-Z_]{3,47}")
TIMEOUTS = ("--timeout", "--max-time", "--time-limit", "--wait")


def argument_class(name: str, words: list[str], reads_heredoc: bool = False) -> str:
    """The class of `name`'s arguments `words`, at most MAX_ARGUMENTS characters."""
    if name == "sleep":
        return octave(sum(seconds(word) or 0.0 for word in words))
    if name == "echo" and len(words) == 1 and _SENTINEL.fullmatch(words[0]):
        return words[0]  # an agent's last words: COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
    parts, words = _subcommand(name, words)
    flags, limit, has_path = _options(words)
    parts += sorted(flags)[:MAX_FLAGS]
    if limit is not None:
        parts.append(f"timeout{octave(limit)}")
    if reads_heredoc:
        parts.append("<<")
    if has_path:
        parts.append("path")
    return joined(parts)


def joined(parts: list[str]) -> str:
    """Join as many parts as fit."""
    line = ""
    for part in parts:
        longer = f"{line} {part}" if line else part
        if len(longer) > MAX_ARGUMENTS:
            break
        line = longer
    return line


def _subcommand(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The words that say what `name` does, and the rest. `git -C dir log` is `log`."""
    if name not in SUBCOMMANDS:
        return [], words
    before: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        has_value = words[at] in ("-C", "-c", "--context", "-n", "-f")
        before += [] if has_value else [words[at]]
        at += 2 if has_value else 1
    found: list[str] = []
    while at < len(words) and len(found) < 2 and _SUBCOMMAND.fullmatch(words[at]):
        found.append(words[at])
        at += 1
        if found[-1] not in TWO_DEEP:
            break
    return found, before + words[at:] if found else words


def _options(words: list[str]) -> tuple[set[str], float | None, bool]:
    """The flags, the longest time limit in seconds, and whether a path is given."""
    flags: set[str] = set()
    limit: float | None = None
    has_path = False
    for at, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in TIMEOUTS:
            given = seconds(value or (words[at + 1] if at + 1 < len(words) else ""))
            limit = max(limit or 0.0, given) if given is not None else limit
        elif known := _FLAG.fullmatch(flag):
            flags.add(known[1])
        elif _NUMBER_FLAG.fullmatch(word):
            flags.add("-N")
        elif not word.startswith("-") and _PATH.fullmatch(word[:256]):
            has_path = True
    return flags, limit, has_path
