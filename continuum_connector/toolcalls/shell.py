"""What a call runs: its tool, or, if that runs a shell, the commands that take time, by name.

`cd`, assignments and the like are dropped if there is another command. Wrappers (`sudo`, `timeout
60`, `uv run`, `bash -c "..."`) count as what they run. Filters after a pipe do not count, because
they take as long as what feeds them. A script is split in one linear pass that respects quotes and
heredocs. Nothing here raises: what bash would refuse is read as far as possible.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Any

from continuum_connector.toolcalls.asked import MAX_CALLS, clean_name

MAX_DEPTH = 3  # of bash -c "bash -c ..."
MAX_COMMANDS, MAX_WORDS, MAX_HEREDOCS = 32, 64, 4  # read of one script, one command, one line
MAX_TOKENS = 512  # words, blanks and separators; each costs a microsecond
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|\\\n|\#[^\n]*)
      | <<-?[ \t]*['"\\]?(?P<heredoc>\w+)['"]?
      | (?P<redirect>\d?(?:<<<|>>|>&|<&|&>>|&>|>\||[<>](?!\())(?:\d-?(?=[\s;&|)]|$))?)
      | (?P<end>\n|&&|\|\|?&?|;;?|&|\$?\(|\)|`)
      | (?P<word>(?:[^\s'"\\;&|<>()`$]+|\$(?!\()|\$\(\([^()]*\)\)|'[^']*'?|"(?:[^"\\]+|\\.)*"?
                 |\\.|\\$)+)
      | .""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = re.compile(r"'([^']*)'?|\"((?:[^\"\\]+|\\.)*)\"?|\\(.)", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]{0,64}\])?\+?=")
_PYTHON = re.compile(r"(python|pip|pypy)[\d.]+$")


def _words(line: str) -> frozenset[str]:
    return frozenset(line.split())


# Keywords that come before a command, and those that no command follows.
BEFORE = _words("if then else elif while until do ! {")
INSTEAD = _words("for case select fi done esac } function [[ ]]")
INSTANT = _words(
    "cd pushd popd source . export set unset shopt alias true false : ulimit umask trap local "
    "declare readonly echo printf test [ exit return break continue mkdir touch pwd clear"
)
# After a pipe, these take as long as what feeds them.
FILTERS = _words("head tail grep egrep rg sed awk sort uniq wc cut tr tee cat less more jq")
WRAPPERS = _words(
    "sudo env timeout gtimeout time nice ionice stdbuf xargs nohup setsid command builtin exec npx "
    "uvx"
)
RUNNERS = _words("uv poetry pipenv pdm hatch rye conda mamba bundle")  # uv run x
# Their options that take a value, if that may be no number; -n and -p only after `run`.
WITH_VALUE = _words(
    "-u -g -C -U -s -S -k -f -o -I -d -a --signal --kill-after --package --from --with --name "
    "--python --extra --group --project"
)
SHELLS = _words("bash sh zsh dash ash")
SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
NO_SHELL_KEYS = _words("path file_path file_text old_str")  # an editor's `command` is no script


# Calls by which public agents say that they are done: OpenHands', mini-swe-agent's.
LAST_TOOLS = ("finish",)
LAST_COMMANDS = (["echo", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],)


def what_runs(name: str, arguments: object) -> tuple[list[str], bool]:
    """The names of what a call runs, none if it has no name yet; and whether an agent says with it
    that it is done, so that no turn follows. A shell block has no name itself."""
    name, script = _tool_and_script(name, arguments)
    own = [name] if name else []
    if script is None:
        return own, name in LAST_TOOLS
    is_there = any(words[-1] in script for words in LAST_COMMANDS)  # most scripts are not split
    is_last = is_there and any(words in LAST_COMMANDS for words, _ in _commands(script))
    return commands_that_take_time(script) or own, is_last


def _tool_and_script(name: str, arguments: object) -> tuple[str, str | None]:
    """The tool that a call names, and the script that it gives to a shell, if it does."""
    name, script = clean_name(name), None
    if isinstance(arguments, str) and name.lower() in {*SHELLS, "shell", "terminal"}:
        script = arguments
    if isinstance(arguments, dict):
        if name == "use_mcp_tool":  # Cline
            name = clean_name(arguments.get("tool_name")) or name
        if "edit" not in name and not NO_SHELL_KEYS & arguments.keys():
            script = _script(next((arguments[k] for k in SCRIPT_KEYS if k in arguments), None))
    return name, script


def _script(value: Any) -> str | None:
    if isinstance(value, list):  # argv, as Codex sends it: ["bash", "-lc", "pytest -q"]
        return shlex.join(word for word in value if isinstance(word, str))
    return value if isinstance(value, str) else None


def commands_that_take_time(script: str, depth: int = 0) -> list[str]:
    """Names of the commands that take time, each once, in order; the last command if none does."""
    slow: dict[str, None] = {}
    last = ""
    for words, is_piped in islice(_commands(script), MAX_COMMANDS):
        for last, takes_time in _names(words, is_piped, depth):
            if takes_time:
                slow[last] = None
    if not slow and last:  # the last command is what the script is for: `export A=1; echo $A`
        return [last]
    return list(slow)[:MAX_CALLS]


def _names(words: list[str], is_piped: bool, depth: int) -> list[tuple[str, bool]]:
    """The names of what one simple command runs, each with whether it takes time."""
    words, is_wrapped = _unwrapped(words)
    if not words or words[0] in INSTEAD:
        return []
    name = _name(words[0])
    script = " ".join(words[1:]) if name == "eval" else None
    option = next((at for at in (1, 2, 3) if re.match("-[a-z]*c$", "".join(words[at : at + 1]))), 0)
    if name in SHELLS and option:
        script = "".join(words[option + 1 : option + 2])
    if script and depth < MAX_DEPTH:
        return [(each, True) for each in commands_that_take_time(script, depth + 1)]
    if name == "python" and "-m" in words[1:3] and words[-1] != "-m":
        name = _name(words[words.index("-m") + 1])
    is_filter = is_piped and not is_wrapped and name in FILTERS
    return [(name, name not in INSTANT and not is_filter)] if name else []


def _unwrapped(words: list[str]) -> tuple[list[str], bool]:
    """Drop the words before the actual command; say whether one was a wrapper."""
    at, wrapper, is_runner = 0, -1, False
    while at < len(words):
        word, name = words[at], words[at].rsplit("/", 1)[-1]
        if name in RUNNERS and words[at + 1 : at + 2] in (["run"], ["exec"]):
            at, wrapper, is_runner = at + 2, at, True
        elif name in WRAPPERS:
            at, wrapper = at + 1, at
        elif wrapper >= 0 and (word in WITH_VALUE or (is_runner and word in ("-n", "-p"))):
            at += 2
        elif (
            word in BEFORE
            or _ASSIGNMENT.match(word)
            or (wrapper >= 0 and re.match(r"[-$\d]", word))
        ):
            at += 1
        else:
            return words[at:], wrapper >= 0
    return (words[wrapper:], False) if wrapper >= 0 else ([], False)


def _name(word: str) -> str:
    """A command's name: no folder, no version of Python; "" if it is none."""
    return _PYTHON.sub(r"\1", clean_name(word.rsplit("/", 1)[-1]))


def _commands(script: str) -> Iterator[tuple[list[str], bool]]:
    """Each simple command's words, and whether it reads the output of another one, in order."""
    words: list[str] = []
    heredocs: list[str] = []
    at, is_piped = 0, False
    drops_word = False  # the next word is the target of a redirection
    after_group = False  # after `)`, only a separator begins a command
    for _ in range(MAX_TOKENS):
        if (token := _TOKEN.match(script, at)) is None:
            break
        at, kind, text = token.end(), token.lastgroup, token[0]
        if kind == "word":
            if not (drops_word or after_group) and len(words) < MAX_WORDS:
                words.append(_QUOTES.sub(lambda each: each[1] or each[2] or each[3] or "", text))
            drops_word = False
        elif kind == "redirect":
            drops_word = text[-1] not in "0123456789-"
        elif kind == "heredoc":
            heredocs.append(token["heredoc"])
        elif kind == "end":
            if words:
                yield words, is_piped
            words, is_piped, drops_word, after_group = [], text in ("|", "|&"), False, text == ")"
            for mark in heredocs[:MAX_HEREDOCS] if text == "\n" else ():
                end = re.compile(rf"^\t*{mark}[ \t]*(?:\n|\Z)", re.MULTILINE).search(script, at)
                at, heredocs = end.end() if end else len(script), []
    if words:
        yield words, is_piped
