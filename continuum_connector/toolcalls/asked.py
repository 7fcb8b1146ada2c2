"""Asked: what a finished turn asks for, in the words that the rest of the package uses."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Ending(enum.Enum):
    """How a turn's output ends."""

    CALLS = "calls"  # with tool calls: the program will be back when they are done
    ANSWER = "answer"  # with words to a person, who will be back in their own time or never
    CUT = "cut"  # before one could tell: the output is truncated
    UNREAD = "unread"  # nobody looked: no tokenizer yet, or no time left in this step


@dataclass(frozen=True)
class ToolCall:
    """One tool call. `name` is a tool's ("get_weather") or, in a shell, a command's ("pytest").

    `arguments` is the class of its arguments, not the arguments: short, the same for calls
    that should take about as long ("-q path"), and free of what only one program would say.
    """

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Asked:
    """What a turn asks for. `calls` is empty unless `ending` is CALLS.

    The program is back when the longest of the calls is done, whether they run side by side
    or, as in `a && b`, after each other: gaps are heavy-tailed, so one of them dominates.
    """

    ending: Ending
    calls: tuple[ToolCall, ...] = ()


UNREAD = Asked(Ending.UNREAD)
