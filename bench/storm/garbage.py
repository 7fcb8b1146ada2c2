"""What no client should send: any JSON type and size, wherever the connector or vLLM reads a hint.

The answer has to be 200 or 400, whatever it is: a hint that cannot be read is no hint, and what
vLLM's own schema forbids is the client's mistake.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

CONTROL = "".join(map(chr, range(1, 32))) + "\x7f\x85\u2028\u202e\ufeff\u0000"
LONG = 100_000

# A JSON value by its name, so that a report can say what was sent without 100 KB of it. Not sent:
# a lone surrogate, such as "\\ud800", and integers beyond 64 bits. Stock vLLM answers 500 to them,
# for it cannot pack them for its EngineCore (v1/engine/core_client.py, msgpack).
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "-1": -1,
    "0.5": 0.5,
    "1e308": 1e308,
    "-1e308": -1e308,
    "5e-324": 5e-324,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "2**63": 2**63,
    "2**64-1": 2**64 - 1,
    "empty text": "",
    "a space": " ",
    "'None'": "None",
    "'true'": "true",
    "'1e308'": "1e308",
    "100 KB of a": "a" * LONG,
    "100 KB of \u20ac": "\u20ac" * (LONG // 3),
    "100 KB of newlines": "\n" * LONG,
    "control characters": CONTROL,
    "another namespace": "job:shared",
    "a path": "../../../etc/passwd",
    "{}": {},
    "[]": [],
    "a list of 1,000 texts": [f"tool-{i}" for i in range(1000)],
    "a list of 1,000 numbers": list(range(1000)),
    "a list of 1,000 nulls": [None] * 1000,
    "a list of every type": [None, True, -1, 1e308, "x", [], {}, "a" * 1000],
    "an object of 1,000 members": {f"member-{i}": i for i in range(1000)},
    "a member of 100 KB name": {"k" * LONG: 1},
    "lists, 100 deep": json.loads("[" * 100 + "]" * 100),
    "objects, 50 deep": json.loads('{"continuum":' * 50 + "1" + "}" * 50),
}
HEADER_VALUES = {
    "empty": "",
    "60 KB": "h" * 60_000,
    "latin-1": "".join(map(chr, range(0xA1, 0x100))),
    "'null'": "null",
    "JSON": '{"session_id": [1, 2], "final": "perhaps", "ttl_s": 1e308}',
    "broken JSON": '{"session_id": ',
    "base64": "eyJzZXNzaW9uX2lkIjogMX0=",
    "spaces": "a b  c",
    "a comma": "one,two",
}
BODIES = {
    "nothing": b"",
    "half an object": b'{"model": "tiny", "prompt": "a',
    "a list": b"[1, 2, 3]",
    "a number": b"7",
    "not UTF-8": b'{"model": "tiny", "job_id": "\xff\xfe"}',
    "no text at all": bytes(range(256)),
}

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
            name, value = rng.choice(HEADERS), rng.choice(list(HEADER_VALUES))
            headers[name] = HEADER_VALUES[value]
            said.append(f"{name}: {value}")
        else:
            place, value = rng.choice(PLACES), rng.choice(list(VALUES))
            put(body, place, VALUES[value])
            said.append(f"{'.'.join(place)} = {value}")
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
