"""Line: one finding, with its verdict, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """OK; WARNING: works, but less well than it could; ERROR: the server would not start, or not
    do what was asked of it; UNSEEN: it could not be looked at from here."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    UNSEEN = "not seen"


class Line(NamedTuple):
    """`subject`: what was looked at; `text`: what was found, and what follows from it."""

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
    """Not a judgement: `text` says why there is none, `cure` where there would be one."""
    return Line(subject, Verdict.UNSEEN, text, cure)


def worst(lines: Iterable[Line]) -> Verdict:
    """ERROR if any line has it, then UNSEEN: what is not known is not ok. Then WARNING, then OK."""
    found = {line.verdict for line in lines}
    order = (Verdict.ERROR, Verdict.UNSEEN, Verdict.WARNING)
    return next((each for each in order if each in found), Verdict.OK)
