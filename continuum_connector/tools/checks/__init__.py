"""WILL IT WORK HERE: lines on a server that is not started, and what it is started with.

A line is what a check finds, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """OK; WARNING: it works, but could work better; UNSEEN: this process could not look at it,
    and the unknown is not ok; ERROR: the server would not start, or would not do what was asked of
    it. The later, the worse."""

    OK = "ok"
    WARNING = "warning"
    UNSEEN = "not seen"
    ERROR = "error"


class Line(NamedTuple):
    """One finding. `subject`: what was looked at; `text`: what it is, and what follows from it."""

    subject: str
    verdict: Verdict
    text: str
    cure: str = ""


def ok(subject: str, text: str) -> Line:
    """Nothing to do."""
    return Line(subject, Verdict.OK, text)


def warning(subject: str, text: str, cure: str) -> Line:
    """It works, and the cure makes it better."""
    return Line(subject, Verdict.WARNING, text, cure)


def error(subject: str, text: str, cure: str) -> Line:
    """It does not work until the cure is applied."""
    return Line(subject, Verdict.ERROR, text, cure)


def unseen(subject: str, text: str, cure: str = "") -> Line:
    """There is no verdict: `text` says why, and `cure` how to get one."""
    return Line(subject, Verdict.UNSEEN, text, cure)


def worst(lines: Iterable[Line]) -> Verdict:
    """The worst verdict of all lines; OK of none."""
    return max((line.verdict for line in lines), key=[*Verdict].index, default=Verdict.OK)


def several(singular: str, number: int) -> str:
    """ "1 GPU", "2 GPUs"."""
    return f"{number:,} {singular}{'' if number == 1 else 's'}"
