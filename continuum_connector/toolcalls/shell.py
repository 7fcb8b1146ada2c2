"""The calls of a shell script: the commands in it that take time, each with a class of arguments.

The first word names a command. `cd`, assignments and the like are dropped if there is another
command. Wrappers (`sudo`, `timeout 60`, `uv run`, `bash -c "..."`) count as what they run. Filters
after a pipe do not count: they take as long as what feeds them.

A class is a subcommand, flags, whether a path is given, and how long: `pytest -q tests/unit` and
`pytest -q tests/vllm` are one class, `pytest` another. It leaves out what only one program would
say (names, patterns, messages). Sizes and times count as powers of two, so that similar ones are
equal.
"""

from __future__ import annotations

import math
import re

from continuum_connector.toolcalls.asked import MAX_ARGUMENTS, MAX_CALLS, ToolCall, clean_name
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


def _words(line: str) -> frozenset[str]:
    return frozenset(line.split())


# Keywords that stand before a command, and those after which none comes.
BEFORE = _words("if then else elif while until do ! { time")
INSTEAD = _words("for case select fi done esac } function [[ ]]")
INSTANT = _words(
    "cd pushd popd source . export set unset shopt alias true false : ulimit umask trap local "
    "declare readonly echo printf test [ exit return break continue mkdir touch pwd clear"
)
# Behind a pipe they take as long as what feeds them.
FILTERS = _words("head tail grep egrep rg sed awk sort uniq wc cut tr tee cat less more jq")
# A wrapper, the options of it that take a value, and how many words before the command.
WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    "sudo": (_words("-u -g -h -p -C -U -r -t"), 0),
    "env": (_words("-u -C -S"), 0),
    "timeout": (_words("-s -k --signal --kill-after"), 1),
    "gtimeout": (_words("-s -k --signal --kill-after"), 1),
    "time": (_words("-f -o"), 0),
    "nice": (_words("-n"), 0),
    "ionice": (_words("-c -n -p"), 0),
    "stdbuf": (_words("-i -o -e"), 0),
    "xargs": (_words("-n -P -I -L -d -s -a -E"), 0),
    "nohup": (_words(""), 0),
    "setsid": (_words(""), 0),
    "command": (_words(""), 0),
    "builtin": (_words(""), 0),
    "exec": (_words("-a"), 0),
    "npx": (_words("-p --package"), 0),
    "uvx": (_words("--from --with"), 0),
}
# `uv run x` and the like stand for x.
RUNNERS = _words("uv poetry pipenv pdm hatch rye conda mamba bundle")
RUNNER_VALUES = _words("-n --name -p --python --with --extra --group --project")
SHELLS = _words("bash sh zsh dash ash")
# Commands whose first word says what they do; and words after which the next one does, too.
SUBCOMMANDS = _words(
    "git pip npm yarn pnpm bun cargo docker podman kubectl apt apt-get make go uv poetry conda "
    "systemctl brew gh dotnet mvn gradle gradlew terraform helm bazel rustup ninja just tox nox "
    "snap dnf yum apk service composer mix bundle rake gem swift zig deno vllm"
)
TWO_DEEP = _words("run compose pip mod pr issue container image stash")


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


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(ms|s|m|h|d)?")
_SECONDS = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_OCTAVE = 40


def octave(value: float) -> str:
    """The power of two above a value: 5 -> "<8". Below 1 it is "<1"."""
    if not value >= 1:  # NaN and what is negative, too
        return "<1"
    exponent = min(MAX_OCTAVE, math.floor(math.log2(min(value, 2.0**MAX_OCTAVE))) + 1)
    return f"<{2**exponent}"


def seconds(text: str) -> float | None:
    """Seconds in "90", "1.5", "2m", "1h"; None if it is no duration."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] if match else None
