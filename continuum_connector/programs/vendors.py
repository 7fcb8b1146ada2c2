"""What agents and gateways already send, and vLLM drops -> continuum fields, by vendor.

Pure: a request's headers (names in lower case) and top-level body fields in, the fields of
`kv_transfer_params.continuum` out. What the client wrote there itself is never changed. Otherwise
agents and gateways say who they are in their vendor's headers and fields, and ids get the vendor's
namespace here ("codex:<id>"). `user` and `safety_identifier` are not read, because they name a
tenant, who runs many programs.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from continuum_connector.programs.identify import as_flag, as_id, as_tools, read_agent_hint
from continuum_connector.programs.program import IdentitySource

Headers = Mapping[str, str]
Fields = dict[str, Any]

MAX_JSON_CHARS = 16_384  # of a header that holds JSON


@dataclass(frozen=True)
class _Vendor:
    """Header names; the first present one of each tuple counts."""

    namespace: str
    program: tuple[str, ...]
    parent: str = ""
    final: str = ""
    compaction: str = ""


# The first match wins: gateways that were told the id on purpose, agents, then correlation ids,
# which some senders change with every request.
_BEFORE_BODY = (
    _Vendor(
        "dynamo",
        ("x-dynamo-session-id",),
        parent="x-dynamo-parent-session-id",
        final="x-dynamo-session-final",
    ),
    _Vendor(
        "deepseek",
        ("x-deepseek-harness-session-id",),
        parent="x-deepseek-harness-parent-session-id",
        compaction="x-deepseek-harness-compact",
    ),
    _Vendor(
        "opencode",
        ("x-opencode-session", "x-session-affinity"),
        parent="x-parent-session-id",
    ),
    _Vendor("litellm", ("x-litellm-session-id",)),
    _Vendor("llm", ("x-llm-session-id",), parent="x-llm-parent-session-id"),
    _Vendor("hermes", ("x-hermes-session-id",)),
    _Vendor("conversation", ("x-conversation-id",)),
)
_AFTER_BODY = (
    _Vendor("helicone", ("helicone-session-id",)),
    _Vendor("multi-turn", ("x-multi-turn-session-id",)),
    _Vendor("correlation", ("x-correlation-id",)),
)
_CODEX = _Vendor(
    "codex",
    ("thread-id", "session-id", "conversation_id", "session_id"),
    parent="x-codex-parent-thread-id",
)
_CODEX_BODY = _Vendor("codex", ("thread_id", "session_id"), parent="x-codex-parent-thread-id")
_CODEX_METADATA = frozenset(
    {*_CODEX_BODY.program, _CODEX_BODY.parent, "x-codex-turn-metadata", "x-openai-subagent"}
)


def read_vendors(headers: Headers, body: Mapping[str, Any], own: Sequence[str] = ()) -> Fields:
    """Return the continuum fields of the first vendor that names a program, else none. `own`: the
    operator's own headers, in lower case, which come first."""
    said = (_fields(name, headers.get(name)) for name in own)
    return next((fields for fields in said if fields), {}) or next(_claims(headers, body), {})


def _claims(headers: Headers, body: Mapping[str, Any]) -> Iterator[Fields]:
    found = (
        _agent_hint(headers),
        _read(_BEFORE_BODY[0], headers),
        _claude_code(headers),
        _codex(headers, body),
        *(_read(vendor, headers) for vendor in _BEFORE_BODY[1:]),
        _fields("cache-key", body.get("prompt_cache_key")),
        _anthropic_metadata(body.get("metadata")),
        _metadata_session(body.get("metadata")),
        *(_read(vendor, headers) for vendor in _AFTER_BODY),
    )
    return (fields for fields in found if fields)


def _fields(
    namespace: str,
    program: object,
    parent: object = None,
    final: bool | None = None,
    compaction: bool | None = None,
) -> Fields:
    """Build continuum fields; empty unless there is a program."""
    name, above = as_id(program), as_id(parent)
    if name is None:
        return {}
    fields: Fields = {
        "program": f"{namespace}:{name}",
        "source": IdentitySource.VENDOR.value,
    }
    if above is not None:
        fields["parent"] = f"{namespace}:{above}"
    if final is not None:
        fields["final"] = final
    if compaction:
        fields["compaction"] = True
    return fields


def _read(vendor: _Vendor, headers: Headers) -> Fields:
    return _fields(
        vendor.namespace,
        next((headers[name] for name in vendor.program if as_id(headers.get(name))), None),
        headers.get(vendor.parent),
        as_flag(headers.get(vendor.final)),
        as_flag(headers.get(vendor.compaction)),
    )


def _claude_code(headers: Headers) -> Fields:
    """One session id for the main agent and all its subagents, which add an agent id.

    The parent's agent id is sent only if a subagent started a subagent. Side requests (titles,
    summaries of tool output) share no prefix with the agent that they serve.
    """
    session = as_id(headers.get("x-claude-code-session-id"))
    if session is None:
        return {}
    kind = headers.get("x-claude-code-request-class", "").strip().lower()
    agent = as_id(headers.get("x-claude-code-agent-id"))
    above = as_id(headers.get("x-claude-code-parent-agent-id"))
    compaction = kind == "compaction" or bool(headers.get("x-claude-code-compaction"))
    program, parent = session, None
    if agent is not None:
        program = f"{session}/{agent}"
        parent = f"{session}/{above}" if above is not None else session
    if kind == "auxiliary":
        program, parent = f"{program}/auxiliary", program
    return _fields("claude-code", program, parent, compaction=compaction)


def _codex(headers: Headers, body: Mapping[str, Any]) -> Fields:
    """In headers, and the same in `client_metadata`, which also reaches us through gateways."""
    raw = body.get("client_metadata")
    said = {name: text for name, text in _texts(raw) if name in _CODEX_METADATA}
    fields = _read(_CODEX, headers)
    if not fields and ("thread_id" in said or "x-codex-turn-metadata" in said):
        fields = _read(_CODEX_BODY, said)
    turn = _json_object(headers.get("x-codex-turn-metadata", ""))
    turn = turn or _json_object(said.get("x-codex-turn-metadata", ""))
    if not fields:  # the turn's metadata repeat who it is
        name = as_id(turn.get("thread_id")) or as_id(turn.get("session_id"))
        fields = _fields("codex", name, turn.get("parent_thread_id"))
    subagent = headers.get("x-openai-subagent") or said.get("x-openai-subagent", "")
    compacts = subagent.strip().lower() == "compact"
    if fields and (compacts or turn.get("request_kind") == "compaction"):
        fields["compaction"] = True
    return fields


def _texts(value: object) -> Iterator[tuple[str, str]]:
    """The members of a JSON object that are texts or numbers."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(each, (str, int)) and not isinstance(each, bool):
                yield name, str(each)


def _agent_hint(headers: Headers) -> Fields:
    """X-Agent-Hint: base64url of the JSON that `kv_transfer_params.agent_hint` holds."""
    text = headers.get("x-agent-hint", "").strip()
    if not text or len(text) > MAX_JSON_CHARS:
        return {}
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return {}
    program, parent, final = read_agent_hint(_json_object(raw))
    return _fields("hint", program, parent, final)


def _anthropic_metadata(metadata: object) -> Fields:
    """Claude Code's `metadata.user_id`: "user_.._account_.._session_<id>", or JSON in a string."""
    user_id = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user_id, str) or len(user_id) > MAX_JSON_CHARS:
        return {}
    match = re.search(r"_session_([0-9A-Za-z-]+)$", user_id)
    if match:
        return _fields("claude-code", match[1])
    fields = _json_object(user_id)
    return _fields("claude-code", fields.get("session_id"), fields.get("parent_session_id"))


def _metadata_session(metadata: object) -> Fields:
    """`metadata.session_id`, as tracing SDKs and proxies put it there, with a parent if any."""
    if not isinstance(metadata, Mapping):
        return {}
    return _fields("metadata", metadata.get("session_id"), metadata.get("parent_session_id"))


def _json_object(text: str) -> Mapping[str, Any]:
    """Parse a JSON object; anything else is an empty one."""
    if len(text) > MAX_JSON_CHARS or not text.lstrip().startswith("{"):
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_carried(
    body: Fields,
    params: Fields,
    said: Fields,
    headers: Mapping[str, str],
    is_messages: bool,
    own: Sequence[str] = (),
) -> Fields:
    """Return the continuum fields that the request implies and the client did not write itself.

    `body`: its top-level fields. `params`: its `kv_transfer_params`. `said`: `continuum` in those.
    `is_messages`: it came to /v1/messages, where vLLM before 0.29 drops `vllm_xargs`. `own`: the
    operator's own headers for ids.
    """
    client = _client_fields(body)
    xargs = _client_fields(body["vllm_xargs"]) if isinstance(body["vllm_xargs"], dict) else {}
    if is_messages:
        client |= xargs
    hint = params.get("agent_hint")
    explicit = "program" in said or "source" in said
    explicit = explicit or (isinstance(hint, dict) and read_agent_hint(hint)[0] is not None)
    if explicit or ("program" in xargs and not is_messages):
        found: Fields = {}  # identify.py reads those itself
    elif "program" in client:
        found = {name: client[name] for name in ("program", "source")}
    else:
        found = _session_fields(body, headers) or read_vendors(headers, body, own)
    found |= {name: client[name] for name in ("final", "tools") if name in client}
    return {name: value for name, value in found.items() if name not in said}


def _client_fields(fields: Mapping[str, Any]) -> Fields:
    """`job_id` and the like, at the top level (the OpenAI client's extra_body) or in vllm_xargs."""
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
    """vLLM's own session id, which vLLM reads from 0.28 on, but without a parent."""
    program = as_id(body.get("session_id")) or as_id(headers.get("x-session-id"))
    if program is None:
        return {}
    parent = as_id(headers.get("x-parent-session-id"))
    found: Fields = {"program": program, "source": IdentitySource.SESSION.value}
    return found if parent is None else {**found, "parent": parent}
