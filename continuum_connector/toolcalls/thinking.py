"""Thinking: what a model says to itself before it acts; calls in there do not count."""

from __future__ import annotations

import re

OPENERS = ("<think>", "<thinking>", "[THINK]", "<seed:think>", "<|begin_of_thought|>")
CLOSERS = ("</think>", "</thinking>", "[/THINK]", "</seed:think>", "<|end_of_thought|>")
_TAG = re.compile("|".join(map(re.escape, (*OPENERS, *CLOSERS))))


def without_thinking(text: str) -> tuple[str, bool]:
    """Return what is said aloud, and whether the text ends inside the thinking.

    A closing tag without an opening one ends thinking too: chat templates often put the
    opening tag into the prompt.
    """
    aloud: list[str] = []
    begin, depth = 0, 0
    for tag in _TAG.finditer(text):
        if tag[0] in CLOSERS:
            begin, depth = tag.end(), 0
        else:
            if depth == 0:
                aloud.append(text[begin : tag.start()])
            depth = 1
    if depth:
        return "".join(aloud), True
    return "".join([*aloud, text[begin:]]), False
