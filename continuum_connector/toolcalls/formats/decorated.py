"""Tags that a model's vocabulary decorates: Hunyuan's <tool_call:6124c78e>, <ifm|tool_call>.

One regular expression for many literal texts, fast where most of them begin alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_DECORATED = re.compile(
    r"<(/?)(?:ifm\|(\w{1,16})|(think|tool_(?:calls?|sep)|arg_(?:key|value)):[^\s<>]{1,16})>"
)


def plain(text: str) -> str:
    """The text with <tool_call>, <arg_key> and the like as everyone else writes them."""
    return _DECORATED.sub(r"<\1\2\3>", text)


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds any of the texts, the longest of those that fit.

    Grouped by their first character: the regular expression engine looks only into the group
    that fits, instead of trying each of forty markers at every `<`.
    """
    groups = groupby(sorted(texts, reverse=True), key=lambda text: text[:1])
    return re.compile("|".join(f"(?:{'|'.join(map(re.escape, group))})" for _, group in groups))
