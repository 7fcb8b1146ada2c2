"""Bodies with hints of every JSON type and size: what a careless or hostile client may send."""

from __future__ import annotations

import json
import math
from typing import Any

LONG = "x" * 100_000
LONE = "a\ud800b"  # half of a pair: JSON may escape it, UTF-8 cannot say it
HUGE = 10**400
DEEP: Any = {"continuum": {"program": "deep"}}
for _ in range(200):
    DEEP = {"continuum": [DEEP]}


def continuum(**fields: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"continuum": fields}}


def hint(**fields: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"agent_hint": fields}}


FIELDS: dict[str, dict[str, Any]] = {
    "a name of 100 KB": continuum(program=LONG, parent=LONG),
    "names of all kinds": continuum(program=[1], parent={"a": 1}, source=7),
    "a name of another's": continuum(program="anonymous:1", source="none"),
    "control characters": continuum(program="\x00\x1b[2J\r\n\u202e", parent="\x7f"),
    "a lone surrogate as name": continuum(program=LONE, parent=LONE, tools=[LONE]),
    "a lone surrogate as job_id": {"job_id": LONE, "prompt_cache_key": LONE},
    "a lone surrogate as metadata": {"metadata": {"user_id": f"user_account_session_{LONE}"}},
    "a lone surrogate as member": {"kv_transfer_params": {LONE: 1}, "job_id": "a"},
    "NaN": continuum(ttl_s=math.nan, keep_s=math.nan, final=math.nan, program=math.nan),
    "infinities": continuum(ttl_s=math.inf, keep_s=-math.inf, final=math.inf),
    "1e308": continuum(ttl_s=1e308, keep_s=1e308, final=1e308),
    "less than nothing": continuum(ttl_s=-0.0, keep_s=-1, final=-1),
    "a number of 400 digits": continuum(ttl_s=HUGE, program=HUGE, final=HUGE),
    "a number of 400 digits as job_id": {"job_id": HUGE, "is_last_step": HUGE},
    "lists of 1,000": continuum(tools=["t" * 99] * 1_000, program=[0] * 1_000),
    "1,000 tools of every kind": continuum(tools=[None, 1, {}, [], LONE, ""] * 167),
    "a dictionary of 1,000": continuum(tools={f"{i}": i for i in range(1_000)}),
    "continuum: null": {"kv_transfer_params": {"continuum": None}, "job_id": "a"},
    "continuum: text": {"kv_transfer_params": {"continuum": "p"}, "job_id": "a"},
    "continuum: list": {"kv_transfer_params": {"continuum": [{"program": "p"}]}},
    "continuum: 200 deep": {"kv_transfer_params": DEEP, "job_id": "a"},
    "params: null": {"kv_transfer_params": None, "job_id": "a"},
    "params: text": {"kv_transfer_params": "p", "job_id": "a"},
    "params: list": {"kv_transfer_params": [1], "job_id": "a"},
    "params: empty": {"kv_transfer_params": {}, "job_id": "a"},
    "params: number": {"kv_transfer_params": HUGE, "job_id": "a"},
    "agent hint: text": {"kv_transfer_params": {"agent_hint": LONG}},
    "agent hint: all kinds": hint(trajectory_id=[1], session_id=1.5, ttl_s="x", tools=7),
    "agent hint: huge": hint(trajectory_id=LONG, parent_session_id=LONG, lease_until=HUGE),
    "xargs: text": {"vllm_xargs": "p"},
    "xargs: all kinds": {"vllm_xargs": {"job_id": [1], "is_last_step": "x", "session_id": 1.5}},
    "xargs: huge": {"vllm_xargs": {"job_id": LONG, "this_func_call": ["t"] * 1_000}},
    "xargs: nested": {"vllm_xargs": {"job_id": {"a": 1}}},
    "xargs: params as text": {"vllm_xargs": {"kv_transfer_params": "p"}},
    "xargs: params as list": {"vllm_xargs": {"kv_transfer_params": ["p"]}},
    "session_id: huge": {"session_id": LONG},
    "session_id: number": {"session_id": 7},
    "session_id: lone surrogate": {"session_id": LONE},
    "job_id: all kinds": {"job_id": {"a": [1]}, "program_id": [], "this_func_call": {"a": 1}},
    "wishes of all kinds": {"cache_control": [1], "prompt_cache_retention": {"a": 1}},
    "a wish in 1,000 places": {"cache_control": [{"type": "ephemeral"}] * 1_000},
    "metadata: huge": {"metadata": {"user_id": LONG}},
    "metadata: text": {"metadata": LONG},
    "a salt of 100 KB": {"cache_salt": LONG, "job_id": "a"},
    "a salt with control characters": {"cache_salt": "\x00\n", "job_id": "a"},
    "a lone surrogate as salt": {"cache_salt": LONE, "job_id": "a"},
    "an empty salt": {"cache_salt": "", "job_id": "a"},
    "a lone surrogate as user": {"user": LONE, "job_id": "a"},
    "a lone surrogate as unknown member": {LONE: LONE, "job_id": "a"},
}


def bodies(api: str, model: str) -> dict[str, bytes]:
    """Name -> body for `/v1/chat/completions` ("chat") or `/v1/completions`."""

    def asking(text: str) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": text}]}
        return {"model": model, "max_tokens": 2, **(chat if api == "chat" else {"prompt": text})}

    found = {name: asking("hi") | fields for name, fields in FIELDS.items()}
    found["a lone surrogate in the prompt"] = asking(LONE)
    found["a lone surrogate in the prompt of a job"] = asking(LONE) | {"job_id": "a"}
    found["a lone surrogate as model"] = {**asking("hi"), "model": LONE}
    raw = {name: json.dumps(body).encode() for name, body in found.items()}
    whole = raw["params: empty"]
    return raw | {
        "a body cut short": whole[:-1],
        "two bodies": whole + whole,
        "no UTF-8": whole.replace(b'"a"', b'"\xff"'),
        "a raw surrogate": whole.replace(b'"a"', b'"\xed\xa0\x80"'),
        "a byte order mark": b"\xef\xbb\xbf" + whole,
        "UTF-16": whole.decode().encode("utf-16"),
        "no object": b"[" + whole + b"]",
        "a member twice": whole[:-1] + b',"kv_transfer_params":7}',
        "100,000 deep": whole[:-1] + b',"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }
