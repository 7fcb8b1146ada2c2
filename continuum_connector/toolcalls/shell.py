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

MAX_CALLS = 8  # per turn; the longest call counts, and it is hardly ever the ninth
MAX_NAME = 64  # characters
MAX_DEPTH = 3  # of bash -c "bash -c ..."
MAX_COMMANDS, MAX_HEREDOCS = 32, 4  # read of one script, of one line
MAX_TOKENS = 256  # words, redirections and separators; each costs a microsecond
_NAME = re.compile(r"(?:functions?[.:])?([A-Za-z_./][\w.+\-/@:]*?)(?::\d+)?")  # functions.bash:0
_WORD = r"""(?:[^\s'"\\;&|<>()`$]+|\$(?!\()|\$\(\([^()]*\)\)|'[^']*'?|"(?:[^"\\]+|\\.)*"?|\\.)+"""
_TOKEN = re.compile(
    rf"""(?:[ \t\r]+|\\\n|\#[^\n]*)*
         (?: <<-?[ \t]*['"\\]?(?P<heredoc>\w+)['"]?
           | [\d&]?(?:<<<|[<>]>?[&|]?)[ \t]*(?:{_WORD})?  # a redirection and its target
           | (?P<end>[\n;&()`]|\|[|&]?)
           | (?P<word>{_WORD})
           | . | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = re.compile(r"'([^']*)'?|\"((?:[^\"\\]+|\\.)*)\"?|\\(.)", re.DOTALL)

_SHELLS = "bash|sh|zsh|dash|ash"
_RUNNERS = "uv|poetry|pipenv|pdm|hatch|rye|conda|mamba|bundle"  # uv run x
_WRAPPERS = (
    "sudo|env|g?timeout|time|nice|ionice|stdbuf|xargs|nohup|setsid|command|builtin|exec|npx|uvx"
)
_WITH_VALUE = (  # those of their options whose value may be no number
    "-[ugCUsSkfoIda]|--(?:signal|kill-after|package|from|with|name|python|extra|group|project)"
)
_INSTANT = (
    r"cd|pushd|popd|source|\.|export|set|unset|shopt|alias|true|false|:|ulimit|umask|trap|local|"
    "declare|readonly|echo|printf|test|exit|return|break|continue|mkdir|touch|pwd|clear"
)
# After a pipe, these take as long as what feeds them.
_FILTERS = "head|tail|[ef]?grep|rg|sed|awk|sort|uniq|wc|cut|tr|tee|cat|less|more|jq"
# A command, a NUL behind each of its words: what may come before its name, then what it runs.
_COMMAND = re.compile(
    rf"""(?: (?:if|then|else|elif|while|until|do|!|{{)\0
           | [A-Za-z_]\w*=[^\0]*\0
           | (?:[^\0]*/)?(?P<wrapper>{_WRAPPERS}|(?P<runner>{_RUNNERS})\0(?:run|exec))\0
             (?:(?:{_WITH_VALUE}|(?(runner)-[np]|(?!)))\0[^\0]*\0|[-$\d][^\0]*\0)* )*
         (?: (?P<instead>for|case|select|fi|done|esac|function)\0
           | (?:[^\0]*/)?(?:eval|(?:{_SHELLS})\0(?:[^\0]*\0){{0,2}}?-[a-z]*c)\0(?P<script>[^\0]+)
           | (?:(?:[^\0]*/)?python[\d.]*\0(?:[^\0]*\0)?-m\0)?(?:[^\0]*/)?
             (?P<name> (?P<instant>{_INSTANT})(?=\0) | (?P<filter>{_FILTERS})(?=\0)
                     | (?:python|pip|pypy)(?=[\d.]+\0) | [^\0]* ) )""",
    re.VERBOSE,
)
SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
NO_SHELL_KEYS = {"path", "file_path", "file_text", "old_str"}  # of an editor's `command`
# Calls by which public agents say that they are done: OpenHands', mini-swe-agent's.
LAST_TOOL = "finish"
LAST_WORDS = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # echoed


def what_runs(name: str, arguments: object) -> tuple[list[str], bool]:
    """The names of what a call runs, none if it has no name yet; and whether an agent says with it
    that it is done, so that no turn follows. A shell block has no name itself."""
    name, script = clean_name(name), None
    if isinstance(arguments, dict):
        if name == "use_mcp_tool":  # Cline
            name = clean_name(arguments.get("tool_name"))
        if "edit" not in name and not NO_SHELL_KEYS & arguments.keys():
            script = next((arguments[key] for key in SCRIPT_KEYS if key in arguments), None)
    elif re.fullmatch(f"{_SHELLS}|shell|terminal", name.lower()):
        script = arguments
    if isinstance(script, list):  # argv, as Codex sends it: ["bash", "-lc", "pytest -q"]
        script = shlex.join(word for word in script if isinstance(word, str))
    own = [name] if name else []
    if not isinstance(script, str):
        return own, name == LAST_TOOL
    last = f"echo\0{LAST_WORDS}\0" if LAST_WORDS in script else None  # most scripts are split once
    is_last = last is not None and any(line == last for line, _ in _commands(script))
    return _slow_commands(script) or own, is_last


def _slow_commands(script: str, depth: int = 0) -> list[str]:
    """Names of the commands that take time, each once, in order; the last command if none does, as
    it is what the script is for: `export A=1; echo $A`."""
    slow: dict[str, None] = {}
    quick = ""
    for line, is_piped in islice(_commands(script), MAX_COMMANDS):
        command = _COMMAND.match(line)
        if command is None or command["instead"]:  # a keyword that no command follows
            continue
        if command["script"] and depth < MAX_DEPTH:
            slow |= dict.fromkeys(_slow_commands(command["script"], depth + 1))
            continue
        wrapper = (command["wrapper"] or "").partition("\0")[0]
        name = clean_name(command["name"] or wrapper)
        if command["instant"] or (command["filter"] and is_piped and not wrapper):
            quick = name or quick
        elif name:
            slow[name] = None
    return list(slow)[:MAX_CALLS] or ([quick] if quick else [])


def _commands(script: str) -> Iterator[tuple[str, bool]]:
    """Each simple command, its words with a NUL behind each, and whether it reads the output of
    another one, in order."""
    line, heredocs = "", list[str]()
    at, is_piped = 0, False
    for _ in range(MAX_TOKENS):
        if at == len(script) or (token := _TOKEN.match(script, at)) is None:
            break
        at, kind, text = token.end(), token.lastgroup, token[token.lastgroup or 0]
        if kind == "word":
            line += _QUOTES.sub(lambda each: each[1] or each[2] or each[3] or "", text) + "\0"
        elif kind == "heredoc":
            heredocs.append(text)
        elif kind == "end":
            if line:
                yield line, is_piped
            # What comes behind `)` is no command: ")" has no name.
            line, is_piped = ")\0" if text == ")" else "", text in ("|", "|&")
            for mark in heredocs[:MAX_HEREDOCS] if text == "\n" else ():
                end = re.compile(rf"^\t*{mark}(?:\n|\Z)", re.MULTILINE).search(script, at)
                at, heredocs = end.end() if end else len(script), []
    yield line, is_piped


def clean_name(name: object) -> str:
    """A tool's name as the statistics have it, without namespace and index; "" if it is no name."""
    if not isinstance(name, str):
        return ""
    match = _NAME.fullmatch(name[: 2 * MAX_NAME].strip().strip("\"'`"))
    return match[1][:MAX_NAME] if match else ""
