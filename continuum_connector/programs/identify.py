"""Read what a request says about itself: which program it belongs to, and hints about its turn.

This is the only reader of client fields, and a total function: whatever a client sends, it either
understands or ignores each field. docs/identity.md tells clients what to send. `identify` reads
what reaches the engine, `read_carried` in the API server what vLLM drops: headers and body fields,
by vendor.

A key is the client's id behind the namespace of the place where it was found ("job:", "session:",
...), so equal ids from different places stay different programs. Ids that a client puts into
`kv_transfer_params.continuum` become keys unchanged; there a client may name any program.
Requests with a `cache_salt` have a namespace per salt (program.py): a client that does not send the
salt can neither read their KV (vLLM) nor name their programs (docs/hints.md).
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import unquote
from uuid import UUID

from msgspec import Struct

from continuum_connector.errors import shown
from continuum_connector.programs.continuation import DIGITS, MAX_PARTS
from continuum_connector.programs.program import Hints, Identity, IdentitySource, program_key

MAX_ID_CHARS = 65_536  # of ids and salts; longer ones name nobody, as hashing them costs too much
MAX_TTL_S = 86_400.0
MAX_TOOLS = 16
MAX_TOOL_CHARS = 64

# str(None) and the like: what programs make of no value, or of one that they cannot write
_NOBODY = frozenset(
    {"none", "null", "nil", "undefined", "nan", "[object object]", str(UUID(int=0))}
)
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})

_NAMESPACES = {
    IdentitySource.CONTINUUM: "",
    IdentitySource.CLIENT: "job:",
    IdentitySource.SESSION: "session:",
    IdentitySource.VENDOR: "",  # the middleware wrote "codex:<id>" and the like
}
_RANKS = {source: rank for rank, source in enumerate(IdentitySource)}


class _Statement(Struct, frozen=True):
    """What one place in the request says, with ids still without a namespace."""

    source: IdentitySource
    namespace: str
    program: str | None = None
    parent: str | None = None
    final: bool | None = None
    ttl_s: float | None = None
    tools: tuple[str, ...] = ()
    compaction: bool | None = None
    unread: tuple[str, ...] = ()
    parts: str = ""


def identify(
    kv_transfer_params: Mapping[str, Any] | None,
    extra_args: Mapping[str, Any] | None,
    session_id: str | None,
    salt: str | None = None,
) -> Identity | None:
    """Return the program the request names, or None if it names none.

    The program comes from the strongest place that names one
    (docs/identity.md); each hint from the strongest place that gives it. Never raises.
    """
    statements = _statements(kv_transfer_params, extra_args, session_id)
    names = [(each, each.program) for each in statements if each.program is not None]
    if not names or len(salt or "") > MAX_ID_CHARS:
        return None
    named, name = names[0]
    key = program_key(named.namespace + name, salt)
    parent = _parent(statements, named, salt)
    hints = _merge(statements, None if parent == key else parent)
    return Identity(key, named.source, hints, named.parts)


def identify_request(request: Any) -> tuple[Identity | None, Hints]:
    """Return what `identify` and `read_hints` make of a vLLM Request."""
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    sent = request.kv_transfer_params
    session = getattr(request, "session_id", None)  # vLLM >= 0.28
    identity = identify(sent, extra, session, request.cache_salt)
    if identity is not None:
        return identity, identity.hints
    return None, read_hints(sent, extra)


def read_hints(
    kv_transfer_params: Mapping[str, Any] | None, extra_args: Mapping[str, Any] | None
) -> Hints:
    """Return the hints of a request that names no program, such as a lone `is_last_step`."""
    return _merge(_statements(kv_transfer_params, extra_args, None), None)


def as_id(value: object) -> str | None:
    """Read an id: text that is not empty or a word for nothing, or a whole number from 0. Else
    None."""
    if isinstance(value, str):
        text = value.strip() if len(value) <= MAX_ID_CHARS else ""
        return text if text and text[:40].lower() not in _NOBODY else None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if 0 <= value < 2**64 else None
    return None


def as_flag(value: object) -> bool | None:
    """Read yes or no from a JSON boolean, 1 or 0, or their usual spellings. Else None."""
    if value is None:
        return None
    if isinstance(value, str):
        word = value[:8].strip().lower()
        return True if word in _YES else False if word in _NO else None
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def _statements(
    kv_transfer_params: Mapping[str, Any] | None,
    extra_args: Mapping[str, Any] | None,
    session_id: str | None,
) -> list[_Statement]:
    """Every place that says something, strongest first; equal ranks keep the order given here."""
    params, xargs = _mapping(kv_transfer_params), _mapping(extra_args)
    statements = []
    if params:
        if fields := _mapping(params.get("continuum")):
            statements.append(_continuum(fields))
        if fields := _mapping(params.get("agent_hint")):
            statements.append(_agent_hint(fields))
    if xargs:
        statements.append(_client(xargs))
    sessions = xargs.get("session_id"), session_id
    statements += [_session(value) for value in sessions if value is not None]
    if len(statements) > 1:
        statements.sort(key=lambda each: _RANKS[each.source])
    return statements


def _continuum(fields: Mapping[str, Any]) -> _Statement:
    """`kv_transfer_params.continuum`, written by the client or (with `source`) the middleware."""
    source = IdentitySource.CONTINUUM
    mark = fields.get("source")
    for candidate in (IdentitySource.CLIENT, IdentitySource.SESSION, IdentitySource.VENDOR):
        if mark == candidate.value:
            source = candidate
    hints: dict[str, Any] = {
        "parent": as_id(fields.get("parent")),
        "final": as_flag(fields.get("final")),
        "ttl_s": as_seconds(fields.get("ttl_s")),
        "tools": as_tools(fields.get("tools")),
        "compaction": as_flag(fields.get("compaction")),
    }
    unread = _unread(fields, {**hints, "keep_s": None})  # a hint that there once was
    program, parts = as_id(fields.get("program")), fields.get("parts")
    parts = parts if isinstance(parts, str) and len(parts) <= MAX_PARTS * DIGITS else ""
    return _Statement(
        *(source, _NAMESPACES[source], program),
        **hints,
        unread=unread,
        parts=parts,
    )


def _unread(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the hints that say something we cannot understand."""
    nothing = (None, ())
    return tuple(
        name for name, read in hints.items() if read in nothing and fields.get(name) is not None
    )


def _agent_hint(fields: Mapping[str, Any]) -> _Statement:
    """`kv_transfer_params.agent_hint` (verl uni-agent; the session form of vLLM RFC 52113).

    `lease_until` is a wall-clock time, `tools_available` what may run, not what will, and
    `kv_priority` a rank among the client's own: none says when this program returns, so they
    have no effect. The first and the last are wishes, and answered as such.
    """
    program, parent, final = read_agent_hint(fields)
    return _Statement(
        IdentitySource.CONTINUUM,
        "hint:",
        program=program,
        parent=parent,
        final=final,
        ttl_s=as_seconds(fields.get("ttl_s")),
        tools=as_tools(fields.get("tools")),
        unread=tuple(n for n in ("lease_until", "kv_priority") if fields.get(n) is not None),
    )


def read_agent_hint(fields: Mapping[str, Any]) -> tuple[str | None, str | None, bool | None]:
    """Return program, parent and final of an agent hint, from the body or X-Agent-Hint."""
    program = as_id(fields.get("trajectory_id")) or as_id(fields.get("session_id"))
    parent = as_id(fields.get("parent_trajectory_id")) or as_id(fields.get("parent_session_id"))
    resumes = as_flag(fields.get("expected_resume"))
    final = as_flag(fields.get("final"))
    return program, parent, (None if resumes is None else not resumes) if final is None else final


def _client(xargs: Mapping[str, Any]) -> _Statement:
    """`vllm_xargs` as clients of the original Continuum (and ThunderAgent) send them."""
    return _Statement(
        IdentitySource.CLIENT,
        _NAMESPACES[IdentitySource.CLIENT],
        program=as_id(xargs.get("job_id")) or as_id(xargs.get("program_id")),
        final=as_flag(xargs.get("is_last_step")),
        tools=as_tools(xargs.get("this_func_call")),
    )


def _session(value: object) -> _Statement:
    source = IdentitySource.SESSION
    return _Statement(source, _NAMESPACES[source], program=as_id(value))


def _parent(statements: list[_Statement], named: _Statement, salt: str | None) -> str | None:
    """Return the key of the parent, if it was given in the same place as the program or if no
    program was given: an id means nothing in another namespace."""
    for each in (named, *statements):
        if each.parent is not None and (each is named or each.program is None):
            return program_key(named.namespace + each.parent, salt)
    return None


def _merge(statements: list[_Statement], parent: str | None) -> Hints:
    """The hints of all statements, each from the strongest that gives it."""
    said = statements[0] if len(statements) == 1 else _together(statements)
    return Hints(
        final=said.final,
        ttl_s=said.ttl_s,
        tools=said.tools,
        parent=parent,
        compaction=bool(said.compaction),
        unread=said.unread,
    )


def _together(statements: list[_Statement]) -> _Statement:
    """What several places say, or none, as one; none names a program."""
    return _Statement(
        IdentitySource.NONE,
        "",
        final=next((each.final for each in statements if each.final is not None), None),
        ttl_s=next((each.ttl_s for each in statements if each.ttl_s is not None), None),
        tools=next((each.tools for each in statements if each.tools), ()),
        compaction=any(each.compaction for each in statements),
        unread=tuple(name for each in statements for name in each.unread),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if value and isinstance(value, Mapping) else {}


def as_seconds(value: object) -> float | None:
    """Read seconds. More than a day counts as a day; anything that is not a duration is ignored."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(min(value, MAX_TTL_S)) if 0 <= value < math.inf else None  # NaN compares false


def as_tools(value: object) -> tuple[str, ...]:
    """Read tool names from a string or a list; invalid items are skipped."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        return ()
    return tuple(islice(_tool_names(items), MAX_TOOLS))


def _tool_names(items: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    for item in islice(items, 4 * MAX_TOOLS):  # bounds what invalid items can cost
        name = as_id(item) if isinstance(item, str) else None
        if name is not None:
            yield shown(name[:MAX_TOOL_CHARS])[:MAX_TOOL_CHARS]


# --- what agents and gateways send to the API server ----------------------------------------
# Pure: a request's headers (names in lower case) and top-level body fields in, the fields of
# `kv_transfer_params.continuum` out. What the client wrote there itself is never changed. Otherwise
# agents and gateways say who they are in their vendor's headers and fields, and ids get the
# vendor's namespace here ("codex:<id>"). `user` and `safety_identifier` are not read, because they
# name a tenant, who runs many programs.
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
    _Vendor("goose", ("agent-session-id",)),
    _Vendor("openwebui", ("x-openwebui-chat-id",)),
)
_AFTER_BODY = (
    _Vendor("task", ("x-roo-task-id", "x-kilocode-taskid", "x-task-id")),
    _Vendor("affinity", ("x-affinity", "x-grok-conv-id", "x-smg-routing-key")),
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
        _agent_hint_header(headers),
        _read(_BEFORE_BODY[0], headers),
        _claude_code(headers),
        _codex(headers, body),
        *(_read(vendor, headers) for vendor in _BEFORE_BODY[1:]),
        _fields("litellm", body.get("litellm_session_id")),
        _conversation(body.get("conversation")),
        _fields("cache-key", body.get("prompt_cache_key")),
        _anthropic_metadata(body.get("metadata")),
        _metadata_session(body.get("metadata")),
        *(_read(vendor, headers) for vendor in _AFTER_BODY),
        _baggage(headers.get("baggage", "")),
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


def _agent_hint_header(headers: Headers) -> Fields:
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


# What tracing SDKs, proxies and agents (Cursor, Qwen Code, LangGraph, Open WebUI) call it.
_SESSIONS = (
    *("session_id", "sessionId", "session.id", "langfuse_session_id", "conversation_id"),
    *("conversationId", "gen_ai.conversation.id", "cursorConversationId", "thread_id", "chat_id"),
)


def _session_in(said: Mapping[str, Any]) -> str | None:
    return next((name for each in _SESSIONS if (name := as_id(said.get(each)))), None)


def _metadata_session(metadata: object) -> Fields:
    """A session in the body's `metadata`, with a parent if any."""
    if not isinstance(metadata, Mapping):
        return {}
    return _fields("metadata", _session_in(metadata), metadata.get("parent_session_id"))


def _baggage(text: str) -> Fields:
    """A session in W3C baggage: `name=value;property,...`, with values percent-encoded."""
    items = (each.partition(";")[0].partition("=") for each in text[:MAX_JSON_CHARS].split(","))
    said = {name.strip(): unquote(value) for name, _, value in items}
    return _fields("baggage", _session_in(said))


def _conversation(value: object) -> Fields:
    """The Responses API's `conversation`: an id, or an object that has one."""
    return _fields("conversation", value.get("id") if isinstance(value, Mapping) else value)


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
    explicit = as_id(said.get("program")) is not None or said.get("source") is not None
    explicit = explicit or (isinstance(hint, dict) and read_agent_hint(hint)[0] is not None)
    if explicit or ("program" in xargs and not is_messages):
        found: Fields = {}  # `identify` reads those itself
    elif "program" in client:
        found = {name: client[name] for name in ("program", "source")}
    else:
        found = _session_fields(body, headers) or read_vendors(headers, body, own)
    found |= {name: client[name] for name in ("final", "tools") if name in client}
    # An id that says nothing, such as null, gives way; a hint that cannot be read is answered.
    return {k: each for k, each in found.items() if said.get(k) is None or k == "program"}


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
