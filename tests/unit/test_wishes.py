"""What other APIs' cache fields wish for, and what reaches the engine through the middleware."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.middleware import rewrite
from continuum_connector.programs.identify import read_hints
from continuum_connector.programs.vendors import read_keep_s

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FIVE, HOUR, DAY = 300.0, 3600.0, 86_400.0


def mark(ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"cache_control": control}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": 'say "cache_control"', **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [text(**mark("1h"))]}
FUNCTION = {"type": "function", "function": {"name": "f", **mark("1h")}}
REQUESTS: list[tuple[str, str, dict[str, Any], float | None]] = [
    ("Claude Code", MESSAGES,
     {"system": [text(), text(**mark("1h"))], "messages": [user(text(**mark()))]}, HOUR),
    ("five minutes", MESSAGES, {"system": [text(**mark("5m"))], "messages": []}, FIVE),
    ("no ttl", MESSAGES, {"messages": [user(text(), text(**mark()))]}, FIVE),
    ("on a tool", MESSAGES, {"tools": [{"name": "f", **mark("1h")}], "messages": []}, HOUR),
    ("in a tool's result", MESSAGES, {"messages": [user(RESULT)]}, HOUR),
    ("of the whole request", MESSAGES, {"messages": [], **mark("1h")}, HOUR),
    ("litellm's chat", CHAT, {"messages": [{"role": "system", "content": [text(**mark())]}]}, FIVE),
    ("litellm's tool", CHAT, {"messages": [], "tools": [FUNCTION]}, HOUR),
    ("OpenHands", CHAT, {"messages": [], "prompt_cache_retention": "24h"}, DAY),
    ("OpenAI in memory", RESPONSES, {"input": "x", "prompt_cache_retention": "in_memory"}, FIVE),
    ("the longest", CHAT,
     {"messages": [user(text(**mark("1h")))], "prompt_cache_retention": "in_memory"}, HOUR),
    ("unknown ttl", MESSAGES, {"messages": [user(text(**mark("2h")))]}, None),
    ("unknown type", MESSAGES, {"messages": [user(text(cache_control={"type": "x"}))]}, None),
    ("odd", MESSAGES, {"messages": [user(text(cache_control="1h"))], "tools": {"a": 1}}, None),
    ("unknown retention", CHAT, {"messages": [], "prompt_cache_retention": 5}, None),
    ("only text", MESSAGES, {"messages": [user(text())], "system": "cache_control"}, None),
    ("another's field", MESSAGES,
     {"tools": [{"name": "f", "input_schema": {"properties": mark("1h")}}], "messages": []}, None),
    ("of the client's own", CHAT,
     {"prompt_cache_retention": "24h", "kv_transfer_params": {"continuum": {"keep_s": 7}}}, 7.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "keep_s"), [r[1:] for r in REQUESTS], ids=[r[0] for r in REQUESTS]
)
def test_requests_of_each_client_wish_for(
    path: str, body: dict[str, Any], keep_s: float | None
) -> None:
    raw = json.dumps({"model": "m", **body}).encode()
    sent = json.loads(rewrite(raw, {}, path) or raw)
    hints = read_hints(sent.get("kv_transfer_params"), None)
    assert (hints.keep_s, hints.ttl_s, hints.final) == (keep_s, None, None)
    if keep_s is None:
        assert rewrite(raw, {}, path) is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cache_control", "content", "ttl", "type", "function"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.lists(JUNK, min_size=1, max_size=5))
def test_reading_wishes_is_total(places: list[Any]) -> None:
    assert read_keep_s(*places) in (None, FIVE, HOUR, DAY)
