"""RawCall: a tool call as the model wrote it, before it becomes a class."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from continuum_connector.toolcalls.asked import MAX_CALLS

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
