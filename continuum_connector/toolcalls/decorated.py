"""Tags that a model's vocabulary decorates: Hunyuan's <tool_call:6124c78e>, <ifm|tool_call>."""

from __future__ import annotations

import re

_DECORATED = re.compile(
    r"<(/?)(?:ifm\|(\w{1,16})|(think|tool_(?:calls?|sep)|arg_(?:key|value)):[^\s<>]{1,16})>"
)


def plain(text: str) -> str:
    """The text with <tool_call>, <arg_key> and the like as everyone else writes them."""
    return _DECORATED.sub(r"<\1\2\3>", text)
