"""The parts of a request that vLLM drops before a connector can see them -> continuum fields.

Pure: a request's top-level body fields and headers (names in lower case) in, the fields of
`kv_transfer_params.continuum` out. What the client wrote there itself is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from continuum_connector.programs.identify import as_flag, as_id, as_tools, read_agent_hint
from continuum_connector.programs.program import IdentitySource
from continuum_connector.programs.vendors import Fields, read_vendors


def read_carried(
    body: Fields, params: Fields, said: Fields, headers: Mapping[str, str], is_messages: bool
) -> Fields:
    """Return the continuum fields the request implies and the client did not write itself.

    `body`: its top-level fields. `params`: of them `kv_transfer_params`, of which `said` is
    `continuum`. `is_messages`: it came to /v1/messages, where vLLM before 0.29 drops `vllm_xargs`.
    """
    client = _client_fields(body)
    xargs = _client_fields(body["vllm_xargs"]) if isinstance(body["vllm_xargs"], dict) else {}
    if is_messages:
        client |= xargs
    hint = params.get("agent_hint")
    explicit = "program" in said or "source" in said
    explicit = explicit or (isinstance(hint, dict) and read_agent_hint(hint)[0] is not None)
    if explicit or ("program" in xargs and not is_messages):
        found: Fields = {}  # identify reads those by itself
    elif "program" in client:
        found = {name: client[name] for name in ("program", "source")}
    else:
        found = _session_fields(body, headers) or read_vendors(headers, body)
    found |= {name: client[name] for name in ("final", "tools") if name in client}
    return {name: value for name, value in found.items() if name not in said}


def _client_fields(fields: Mapping[str, Any]) -> Fields:
    """`job_id` and its kin, top level (the OpenAI client's extra_body) or in vllm_xargs."""
    program = as_id(fields.get("job_id")) or as_id(fields.get("program_id"))
    final = as_flag(fields.get("is_last_step"))
    tools = as_tools(fields.get("this_func_call"))
    found: Fields = {}
    if program is not None:
        found |= {"program": program, "source": IdentitySource.CLIENT.value}
    if final is not None:
        found["final"] = final
    if tools:
        found["tools"] = list(tools)
    return found


def _session_fields(body: Mapping[str, Any], headers: Mapping[str, str]) -> Fields:
    """vLLM's own session id: read by it from 0.28 on, but never with a parent."""
    program = as_id(body.get("session_id")) or as_id(headers.get("x-session-id"))
    if program is None:
        return {}
    parent = as_id(headers.get("x-parent-session-id"))
    found: Fields = {"program": program, "source": IdentitySource.SESSION.value}
    return found if parent is None else {**found, "parent": parent}
