"""What no client should send: any JSON type and size, wherever the connector or vLLM reads a hint.

The answer has to be 200 or 400, whatever it is: a hint that cannot be read is no hint, and what
vLLM's own schema forbids is the client's mistake.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from reprlib import repr as short  # so that a report says what was sent without 100 KB of it
from typing import Any

CONTROL = "".join(map(chr, range(1, 32))) + "\x7f\x85\u2028\u202e\ufeff\u0000"
LONG = 100_000

# Not sent: a lone surrogate, such as "\\ud800", and integers beyond 64 bits. Stock vLLM answers 500
# to them, for it cannot pack them for its EngineCore (v1/engine/core_client.py, msgpack).
NUMBERS = (0, -1, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 2**63, 2**64 - 1)
WORDS = ("", " ", "None", "true", "1e308", CONTROL, "job:shared", "../../../etc/passwd")
LONG_TEXTS = ("a" * LONG, "\u20ac" * (LONG // 3), "\n" * LONG)
LISTS = (
    *([], [f"tool-{i}" for i in range(1000)], list(range(1000)), [None] * 1000),
    *([None, True, -1, 1e308, "x", [], {}, "a" * 1000], json.loads("[" * 100 + "]" * 100)),
)
OBJECTS = (
    *({}, {f"member-{i}": i for i in range(1000)}, {"k" * LONG: 1}),
    json.loads('{"continuum":' * 50 + "1" + "}" * 50),
)
VALUES = (None, True, False, *NUMBERS, *WORDS, *LONG_TEXTS, *LISTS, *OBJECTS)
HEADER_VALUES = (
    *("", "h" * 60_000, "".join(map(chr, range(0xA1, 0x100))), "null", "a b  c", "one,two"),
    *('{"session_id": [1, 2], "final": "perhaps", "ttl_s": 1e308}', '{"session_id": '),
    "eyJzZXNzaW9uX2lkIjogMX0=",
)
BODIES = (
    *(b"", b'{"model": "tiny", "prompt": "a', b"[1, 2, 3]", b"7"),
    *(b'{"model": "tiny", "job_id": "\xff\xfe"}', bytes(range(256))),
)

_CONTINUUM = ("program", "parent", "final", "ttl_s", "keep_s", "tools", "compaction", "source")
_AGENT_HINT = ("trajectory_id", "session_id", "parent_session_id", "expected_resume", "final")
_AGENT_HINT += ("ttl_s", "tools", "lease_until", "kv_priority")
_XARGS = ("job_id", "program_id", "is_last_step", "this_func_call", "session_id")
_TOP = ("prompt_cache_key", "prompt_cache_retention", "metadata", "cache_control", "cache_salt")
PLACES: tuple[tuple[str, ...], ...] = (
    ("kv_transfer_params",),
    ("vllm_xargs",),
    ("kv_transfer_params", "continuum"),
    ("kv_transfer_params", "agent_hint"),
    *(("kv_transfer_params", "continuum", name) for name in (*_CONTINUUM, "unheard_of")),
    *(("kv_transfer_params", "agent_hint", name) for name in _AGENT_HINT),
    *(("vllm_xargs", name) for name in _XARGS),
    *((name,) for name in (*_XARGS, *_TOP)),
)
HEADERS = (
    *("X-Session-ID", "X-Agent-Hint", "X-Dynamo-Session-ID", "X-Dynamo-Session-Final"),
    *("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Opencode-Session"),
    *("session_id", "X-LiteLLM-Session-Id", "X-Correlation-ID", "X-Parent-Session-ID"),
)


def spoil(rng: random.Random, body: dict[str, Any], headers: dict[str, str]) -> list[str]:
    """Put one to three bad values into a request; say which, and where."""
    said = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.2:
            name, value = rng.choice(HEADERS), rng.choice(HEADER_VALUES)
            headers[name] = value
            said.append(f"{name}: {short(value)}")
        else:
            place, value = rng.choice(PLACES), rng.choice(VALUES)
            put(body, place, value)
            said.append(f"{'.'.join(place)} = {short(value)}")
    return said


def put(body: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    """Set a member, making the objects above it where there are none; `body` alone is changed."""
    *above, name = place
    for each in above:
        inner = body.get(each)
        body[each] = dict(inner) if isinstance(inner, Mapping) else {}
        body = body[each]
    body[name] = value


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON with NaN and infinities, as Python, JavaScript libraries and proxies do write them."""
    return json.dumps(body).encode()
