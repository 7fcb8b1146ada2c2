"""Asked: what a finished turn asks for, in the words that the rest of the package uses."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_CALLS = 8  # per turn; the longest call counts, and it is hardly ever the ninth
MAX_NAME = 64  # characters
_NAME = re.compile(r"(?:functions?[.:])?([A-Za-z_./][\w.+\-/@:]*?)(?::\d+)?")  # functions.bash:0


class Ending(enum.Enum):
    """How a turn's output ends."""

    CALLS = "calls"  # with tool calls: the program returns when they are done
    LAST = "last"  # with a call by which a public agent says that it is done
    ANSWER = "answer"  # with words to a person, who returns in their own time or never
    CUT = "cut"  # truncated before one could tell
    UNREAD = "unread"  # we did not look: no tokenizer yet, or no time left in this step


@dataclass(frozen=True)
class Asked:
    """What a turn asks for: the names of the tools that it calls, without their arguments.

    A name is that of a tool ("get_weather") or, in a shell, of a command ("pytest"). There are none
    unless `ending` is CALLS or LAST. Gaps are heavy-tailed, so the longest call dominates, whether
    the calls run in parallel or, as in `a && b`, one after another. `in_blocks`: the calls are
    shell blocks, which somebody runs only if the prompt asked for such blocks.
    """

    ending: Ending
    tools: tuple[str, ...] = ()
    in_blocks: bool = field(default=False, compare=False)


UNREAD, CUT, ANSWER = Asked(Ending.UNREAD), Asked(Ending.CUT), Asked(Ending.ANSWER)
WHY_UNREAD = ("no_tokenizer", "no_time", "error")  # the tokenizer raised


def asked_of(declared: tuple[str, ...], read: Callable[[], Asked]) -> Asked:
    """What the client says it will run (`hints.tools`), else what `read` finds: a client knows
    better than we can read from its text."""
    names = dict.fromkeys(name for tool in declared if (name := clean_name(tool)))
    return Asked(Ending.CALLS, tuple(names)[:MAX_CALLS]) if names else read()


def clean_name(name: object) -> str:
    """A tool's name as the statistics have it, without namespace and index; "" if it is no name."""
    if not isinstance(name, str):
        return ""
    match = _NAME.fullmatch(name[: 2 * MAX_NAME].strip().strip("\"'`"))
    return match[1][:MAX_NAME] if match else ""
