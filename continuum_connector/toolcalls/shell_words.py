"""A shell script as simple commands: words between separators, quotes and heredocs respected.

One pass, linear, no errors: it reads what bash would refuse as far as it can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_COMMANDS = 32  # more than this many in one script are not read
MAX_WORDS = 64  # of one command
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


@dataclass
class Command:
    """One simple command. `piped`: it reads what another one writes."""

    words: list[str] = field(default_factory=list)
    piped: bool = False
    reads_heredoc: bool = False


def commands_of(script: str) -> list[Command]:
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
        self._drops_word = False  # the target of a redirection comes next
        self._after_group = False  # behind `)` only a separator begins a command

    def take(self, token: re.Match[str]) -> int:
        """Take one token; return where the next one begins."""
        kind = token.lastgroup if token.lastgroup not in ("quote", "mark") else "heredoc"
        text = token[0]
        if kind == "newline":
            self.end_command(piped=False)
            return self._skip_heredocs(token.end())
        if kind == "heredoc":
            self._heredocs.append(token["mark"])
            self._command.reads_heredoc = True
        elif kind == "redirect":
            self._drops_word = not text[-1].isdigit() and not text.endswith("-")
        elif kind == "end":
            self.end_command(piped=text in ("|", "|&"))
            self._after_group = text == ")"
        elif kind == "word":
            self._take_word(text)
        return token.end()

    def end_command(self, piped: bool) -> None:
        """What came so far is a command; the next one is `piped` from it."""
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
