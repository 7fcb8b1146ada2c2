"""Asked: what a finished turn asks for, in the words that the rest of the package uses.

RawCall: one call as the model wrote it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_CALLS = 8  # of one turn; the longest counts, and the ninth is hardly ever it
MAX_NAME = 64  # characters
_NAME = re.compile(r"(?:functions?[.:])?([A-Za-z_./][\w.+\-/@:]*?)(?::\d+)?")  # functions.bash:0


class Ending(enum.Enum):
    """How a turn's output ends."""

    CALLS = "calls"  # with tool calls: the program will be back when they are done
    ANSWER = "answer"  # with words to a person, who will be back in their own time or never
    CUT = "cut"  # before one could tell: the output is truncated
    UNREAD = "unread"  # nobody looked: no tokenizer yet, or no time left in this step


@dataclass(frozen=True)
class Asked:
    """What a turn asks for: the names of the tools that it calls, without what they are given.

    A name is a tool's ("get_weather") or, in a shell, a command's ("pytest"). There is none
    unless `ending` is CALLS. The program is back when the longest of the calls is done, whether
    they run side by side or, as in `a && b`, after each other: gaps are heavy-tailed, so one of
    them dominates.
    """

    ending: Ending
    tools: tuple[str, ...] = ()


UNREAD = Asked(Ending.UNREAD)
WHY_UNREAD = ("no_tokenizer", "no_time", "error")  # the tokenizer raised


def asked_of(declared: tuple[str, ...], read: Callable[[], Asked]) -> Asked:
    """What the client declared it will run (`hints.tools`), else what `read` finds.

    A client knows better than any reading of its text, and costs no time: `read` is then
    not called.
    """
    names = [name for tool in declared if (name := clean_name(tool))]
    if not names:
        return read()
    return Asked(Ending.CALLS, tuple(dict.fromkeys(names))[:MAX_CALLS])


def clean_name(name: object) -> str:
    """A tool's name as statistics know it: no namespace, no index; "" if it is none."""
    if not isinstance(name, str):
        return ""
    match = _NAME.fullmatch(name[: 2 * MAX_NAME].strip().strip("\"'`"))
    return match[1][:MAX_NAME] if match else ""


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
