"""RawCall: a tool call as the model wrote it, before it becomes a class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawCall:
    """A call in the text. `arguments`: a dict where the format has keys, else text or None.

    `name` is "" where there is none: it is not there yet, or a format's only tool is a shell.
    `finished` is False if the text ends inside the call.
    """

    name: str
    arguments: object = None
    finished: bool = True
