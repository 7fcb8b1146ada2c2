"""vLLM's KvHints (0.32+): the actions of a request's envelope -> hints.

vLLM carries the envelope from AsyncLLM.generate to Request.kv_hints and defines no action types
(v1/kv_hints/protocol.py), so these types are ours. Pure and total: an action that we do not know
becomes an answer, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

MAX_ACTIONS = 16
MAX_ACTION_ID_CHARS = 64

ACTION_TYPES = {"pin": "ttl_s", "retain": "keep_s"}  # the hint that it becomes


@dataclass(frozen=True)
class Actions:
    """`said`: values by hint, as sent. `became`: each action's id with its hint, "" if it has
    none."""

    said: Mapping[str, Any] = field(default_factory=dict)
    became: tuple[tuple[str, str], ...] = ()


NO_ACTIONS = Actions()


def read_actions(envelope: Any) -> Actions:
    """Read a KvHintsEnvelope, or None. The first action of a kind counts. Never raises."""
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, (list, tuple)) or not actions:
        return NO_ACTIONS
    said: dict[str, Any] = {}
    became = []
    for action in islice(actions, MAX_ACTIONS):
        hint, value = _read(action)
        if value is not None:
            said.setdefault(hint, value)
        name = getattr(action, "action_id", "")
        name = name[:MAX_ACTION_ID_CHARS] if isinstance(name, str) else ""
        became.append((name, hint if value is not None else ""))
    return Actions(said, tuple(became))


def _read(action: Any) -> tuple[str, Any]:
    """Return hint and value of an action; ("", None) if we do not know it."""
    kind = getattr(action, "action_type", None)
    payload = getattr(action, "payload", None)
    hint = ACTION_TYPES.get(kind, "") if isinstance(kind, str) else ""
    value = payload.get("ttl_s") if isinstance(payload, Mapping) else None
    if not hint or isinstance(value, bool) or not isinstance(value, (int, float)):
        return hint, None
    return hint, value if 0 <= value < math.inf else None
