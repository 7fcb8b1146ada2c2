"""The commands in a shell script that take time, by name.

The first word names a command. `cd`, assignments and the like are dropped if there is another
command. Wrappers (`sudo`, `timeout 60`, `uv run`, `bash -c "..."`) count as what they run. Filters
after a pipe do not count, because they take as long as what feeds them.

A script is split in one linear pass that respects quotes and heredocs. It raises no errors: what
bash would refuse is read as far as possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from continuum_connector.toolcalls.asked import MAX_CALLS, clean_name

MAX_DEPTH = 3  # of bash -c "bash -c ..."
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]{0,64}\])?\+?=")
_PYTHON = re.compile(r"(python|pip|pypy)[\d.]+$")
MAX_COMMANDS = 32  # read of one script
MAX_WORDS = 64  # read of one command
MAX_TOKENS = 512  # words, blanks and separators; each costs a microsecond
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|\\\n)
      | (?P<comment>\#[^\n]*)
      | (?P<newline>\n)
      | (?P<heredoc><<-?[ \t]*(?P<quote>['"\\]?)(?P<mark>\w+)['"]?)
      | (?P<redirect>\d?(?:<<<|>>|>&|<&|&>>|&>|>\||[<>](?!\())(?:\d-?(?=[\s;&|)]|$))?)
      | (?P<end>&&|\|\|?&?|;;?|&|\$?[<>]?\(|\)|`)
      | (?P<word>(?:[^\s'"\\;&|<>()`$]+|\$(?!\()|\$\(\([^()]*\)\)|'[^']*'?|"(?:[^"\\]+|\\.)*"?
                 |\\.|\\$)+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = re.compile(r"'([^']*)'?|\"((?:[^\"\\]+|\\.)*)\"?|\\(.)", re.DOTALL)


def commands_that_take_time(script: str, depth: int = 0) -> list[str]:
    """Names of the commands that take time, each once, in order; the last command if none does."""
    slow: dict[str, None] = {}
    last = ""
    for command in split(script):
        for last, takes_time in _names(command, depth):
            if takes_time:
                slow[last] = None
        if len(slow) >= MAX_CALLS:
            break
    if not slow and last:  # the last command is what the script is for: `export A=1; echo $A`
        return [last]
    return list(slow)[:MAX_CALLS]


def _names(command: Command, depth: int) -> list[tuple[str, bool]]:
    """The names of what one simple command runs, each with whether it takes time."""
    words, wrapped = _unwrapped(command.words)
    if not words:
        return []
    name = _name(words[0])
    if (script := _inner_script(name, words)) is not None and depth < MAX_DEPTH:
        return [(name, True) for name in commands_that_take_time(script, depth + 1)]
    if name == "python" and "-m" in words[1:3] and len(words) > (at := words.index("-m") + 1):
        name = _name(words[at])
    if not name:
        return []
    is_filter = command.piped and not wrapped and name in FILTERS
    return [(name, name not in INSTANT and not is_filter)]


def _unwrapped(words: list[str]) -> tuple[list[str], bool]:
    """Drop the words before the actual command; say whether one was a wrapper."""
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


# Keywords that come before a command, and those that no command follows.
BEFORE = _words("if then else elif while until do ! { time")
INSTEAD = _words("for case select fi done esac } function [[ ]]")
INSTANT = _words(
    "cd pushd popd source . export set unset shopt alias true false : ulimit umask trap local "
    "declare readonly echo printf test [ exit return break continue mkdir touch pwd clear"
)
# After a pipe, these take as long as what feeds them.
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


@dataclass
class Command:
    """One simple command. `piped`: it reads the output of another one."""

    words: list[str] = field(default_factory=list)
    piped: bool = False


def split(script: str) -> list[Command]:
    """Split a script into its simple commands, in order, empty ones left out."""
    reader = _Reader(script)
    position = 0
    for _ in range(MAX_TOKENS):
        if position >= len(script) or len(reader.found) >= MAX_COMMANDS:
            break
        token = _TOKEN.match(script, position)
        if token is None:  # unreachable: `other` matches anything
            break
        position = reader.take(token)
    reader.end_command(piped=False)
    return reader.found


class _Reader:
    """Where in the script we are."""

    def __init__(self, script: str) -> None:
        self.found: list[Command] = []
        self._script = script
        self._command = Command()
        self._heredocs: list[str] = []
        self._drops_word = False  # the next word is the target of a redirection
        self._after_group = False  # after `)`, only a separator begins a command

    def take(self, token: re.Match[str]) -> int:
        """Take one token; return where the next one begins."""
        kind = token.lastgroup if token.lastgroup not in ("quote", "mark") else "heredoc"
        text = token[0]
        if kind == "newline":
            self.end_command(piped=False)
            return self._skip_heredocs(token.end())
        if kind == "heredoc":
            self._heredocs.append(token["mark"])
        elif kind == "redirect":
            self._drops_word = not text[-1].isdigit() and not text.endswith("-")
        elif kind == "end":
            self.end_command(piped=text in ("|", "|&"))
            self._after_group = text == ")"
        elif kind == "word":
            self._take_word(text)
        return token.end()

    def end_command(self, piped: bool) -> None:
        """The words so far are a command; `piped` says whether it feeds the next one."""
        if self._command.words:
            self.found.append(self._command)
        self._command = Command(piped=piped)
        self._drops_word = self._after_group = False

    def _take_word(self, text: str) -> None:
        if self._drops_word:
            self._drops_word = False
        elif not self._after_group and len(self._command.words) < MAX_WORDS:
            self._command.words.append(unquoted(text))

    def _skip_heredocs(self, position: int) -> int:
        for mark in self._heredocs[:4]:
            end = re.compile(rf"^\t*{re.escape(mark)}[ \t]*$", re.MULTILINE)
            found = end.search(self._script, position)
            position = min(found.end() + 1, len(self._script)) if found else len(self._script)
        self._heredocs = []
        return position


def unquoted(word: str) -> str:
    """A word without its quotes."""
    if "'" not in word and '"' not in word and "\\" not in word:
        return word
    return _QUOTES.sub(lambda part: part[1] or part[2] or part[3] or "", word)
