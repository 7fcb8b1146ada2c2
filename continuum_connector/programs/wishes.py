"""Wishes in other APIs' words: for how long a client would like its KV to be found again.

Anthropic: `cache_control: {"type": "ephemeral", "ttl": "5m" | "1h"}`, at the top of a request or on
a block of `system`, `messages` (in `content`, to any depth of tool results) or `tools`. OpenAI:
`prompt_cache_retention: "in_memory" | "24h"`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Anthropic's default is 5 minutes; OpenAI promises 5 to 10 minutes for what is in memory.
ANTHROPIC_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
OPENAI_S = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}


def read_keep_s(
    retention: Any, mark: Any = None, system: Any = None, messages: Any = None, tools: Any = None
) -> float | None:
    """Return the longest wish in seconds, None if there is none. Never raises."""
    wishes = [_marked_s(mark), *map(_marked_of, _blocks(system, messages, tools))]
    if isinstance(retention, str):
        wishes.append(OPENAI_S.get(retention))
    return max((wish for wish in wishes if wish is not None), default=None)


def _blocks(*places: Any) -> Iterator[dict[str, Any]]:
    """Every object of these lists and of the `content` in them, once; no other member.

    They come from JSON: dict and list are asked for, as an abstract class takes ten times as long.
    """
    pending = [place for place in places if isinstance(place, list)]
    while pending:
        for item in pending.pop():
            if not isinstance(item, dict):
                continue
            yield item
            if isinstance(content := item.get("content"), list):
                pending.append(content)
            if isinstance(item.get("function"), dict):  # OpenAI's form of a tool
                yield item["function"]


def _marked_of(block: dict[str, Any]) -> float | None:
    return _marked_s(block.get("cache_control"))


def _marked_s(mark: Any) -> float | None:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        return None
    ttl = mark.get("ttl")
    return ANTHROPIC_S.get(ttl) if ttl is None or isinstance(ttl, str) else None
