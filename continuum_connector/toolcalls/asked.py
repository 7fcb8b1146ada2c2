"""Asked: what a finished turn asks for, in the words that the rest of the package uses.

RawCall: one call as the model wrote it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_CALLS = 8  # per turn; the longest call counts, and it is hardly ever the ninth
MAX_NAME = 64  # characters
_NAME = re.compile(r"(?:functions?[.:])?([A-Za-z_./][\w.+\-/@:]*?)(?::\d+)?")  # functions.bash:0


class Ending(enum.Enum):
    """How a turn's output ends."""

    CALLS = "calls"  # with tool calls: the program returns when they are done
    ANSWER = "answer"  # with words to a person, who returns in their own time or never
    CUT = "cut"  # truncated before one could tell
    UNREAD = "unread"  # we did not look: no tokenizer yet, or no time left in this step


@dataclass(frozen=True)
class Asked:
    """What a turn asks for: the names of the tools that it calls, without their arguments.

    A name is that of a tool ("get_weather") or, in a shell, of a command ("pytest"). There are none
    unless `ending` is CALLS. The program returns when the longest call is done, whether the calls
    run in parallel or, as in `a && b`, one after another: gaps are heavy-tailed, so one call
    dominates.
    """

    ending: Ending
    tools: tuple[str, ...] = ()


UNREAD = Asked(Ending.UNREAD)
WHY_UNREAD = ("no_tokenizer", "no_time", "error")  # the tokenizer raised


def asked_of(declared: tuple[str, ...], read: Callable[[], Asked]) -> Asked:
    """What the client says it will run (`hints.tools`), else what `read` finds.

    A client knows better than we can read from its text. If it says so, `read` is not called, which
    saves its time.
    """
    names = [name for tool in declared if (name := clean_name(tool))]
    if not names:
        return read()
    return Asked(Ending.CALLS, tuple(dict.fromkeys(names))[:MAX_CALLS])


def clean_name(name: object) -> str:
    """A tool's name as the statistics have it, without namespace and index; "" if it is no name."""
    if not isinstance(name, str):
        return ""
    match = _NAME.fullmatch(name[: 2 * MAX_NAME].strip().strip("\"'`"))
    return match[1][:MAX_NAME] if match else ""


ReadOne = Callable[[str, "re.Match[str]"], "tuple[RawCall, int]"]  # the call, and where it ends


@dataclass(frozen=True)
class RawCall:
    """A call in the text. `arguments`: a dict if the format has keys, else text or None.

    `name` is "" if the text ends before it, or if the format's only tool is a shell. `finished` is
    False if the text ends inside the call.
    """

    name: str
    arguments: object = None
    finished: bool = True


def read_each(text: str, start: int, opener: re.Pattern[str], read_one: ReadOne) -> list[RawCall]:
    """Read a call at each opener from `start` on, each after the end of the one before."""
    calls: list[RawCall] = []
    while len(calls) < MAX_CALLS and (opened := opener.search(text, start)):
        call, start = read_one(text, opened)
        calls.append(call)
    return calls
