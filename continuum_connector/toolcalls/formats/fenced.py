"""A fenced shell block: mini-swe-agent and every agent whose only tool is a shell."""

from __future__ import annotations

import re

from continuum_connector.toolcalls.arguments import RawCall

LANGUAGES = ("bash", "sh", "shell", "zsh", "console", "mswea_bash_command")
OPEN = re.compile(rf"```(?:{'|'.join(LANGUAGES)})[ \t]{{0,8}}(?:\n|$)")
_CLOSE = re.compile(r"\n[ \t]{0,8}```")


def read_block(text: str, opened: re.Match[str]) -> tuple[RawCall, int]:
    """Read the block that `opened` opens; return it and where it ends.

    The first line that begins with three backticks ends it, as in mini-swe-agent, even
    inside a heredoc.
    """
    begin = opened.end() - 1 if text[opened.end() - 1 : opened.end()] == "\n" else opened.end()
    close = _CLOSE.search(text, begin)
    end = close.start() if close is not None else len(text)
    call = RawCall("", {"command": text[begin:end]}, close is not None)
    return call, close.end() if close is not None else len(text)
