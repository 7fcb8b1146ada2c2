"""ASGI middleware: carries identities that vLLM's front end drops into kv_transfer_params.

    vllm serve MODEL ... --middleware continuum_connector.middleware.ProgramMiddleware

Optional. vLLM parses a request into its own fields and drops the rest before a connector can
see it: top-level `job_id`, agents' headers, `prompt_cache_key`, `metadata`, `cache_control`,
`prompt_cache_retention`. On the four generating APIs this adds them as
`kv_transfer_params.continuum`, which all four pass on (vLLM 0.26-0.33; `vllm_xargs` does not
survive /v1/messages before 0.29). What the client put there itself is never
changed. What would fail on vLLM's way to its engine, and be answered with 500, is answered with
400 and a sentence. Stateless: any number of API servers may run it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from continuum_connector.programs.identify import as_flag, as_id, as_tools, read_agent_hint
from continuum_connector.programs.program import IdentitySource
from continuum_connector.programs.vendors import Fields, read_vendors
from continuum_connector.programs.wishes import read_keep_s

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MESSAGES_PATH = "/v1/messages"
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_PATH})
MAX_BODY_BYTES = 64 * 2**20  # larger bodies pass unread
MAX_FIELD_BYTES = 2**18  # of one field that we read, longer ones say nothing
MAX_MARKED_BYTES = 2**22  # of a body in which we look for cache marks: a million tokens of text
MAX_ODD_BYTES = 2**20  # of a body that is no strict JSON


class UnsendableError(ValueError):
    """A request that vLLM accepts, cannot hand to its engine, and would answer with 500."""


class ProgramMiddleware:
    """Adds identity to requests; anything it does not understand passes byte for byte."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = _headers(scope)
            path = _generating_path(scope)
            if path and _has_json_body(headers):
                scope = dict(scope)
                receive = _RewrittenBody(scope, headers, path, receive)
        await self.app(scope, receive, send)


class _RewrittenBody:
    """A `receive` whose request body has been rewritten; later messages pass through.

    It reads nothing before the application does: vLLM checks the API key further in, and a
    stranger must not make us buffer a body. Messages after the body are the server's own, so
    a client's disconnect still aborts its request.
    """

    def __init__(
        self, scope: Scope, headers: Mapping[str, str], path: str, receive: Receive
    ) -> None:
        self._scope = scope
        self._headers = headers
        self._path = path
        self._receive = receive
        self._ready: deque[Message] = deque()
        self._started = False

    async def __call__(self) -> Message:
        if not self._started:
            self._started = True
            await self._read()
        return self._ready.popleft() if self._ready else await self._receive()

    async def _read(self) -> None:
        """Collect the body and queue it, rewritten if that adds something, else as it came."""
        size, complete = 0, False
        while not complete and size <= MAX_BODY_BYTES:
            message = await self._receive()
            self._ready.append(message)
            if message["type"] != "http.request":
                return
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
        if not complete or size > MAX_BODY_BYTES:
            return
        body = b"".join(message.get("body", b"") for message in self._ready)
        try:
            rewritten = rewrite(body, self._headers, self._path)
        except UnsendableError as error:
            from fastapi import HTTPException  # where vLLM serves; `continuum check` is without

            raise HTTPException(400, str(error)) from None
        if rewritten is None:
            return
        self._ready.clear()
        self._ready.append({"type": "http.request", "body": rewritten, "more_body": False})
        self._scope["headers"] = [
            (name, str(len(rewritten)).encode() if name.lower() == b"content-length" else value)
            for name, value in self._scope["headers"]
        ]


_NOTHING = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The top-level body fields we look at, as they came: a body is walked once, in C, and nothing
    is built of it."""

    job_id: msgspec.Raw = _NOTHING
    program_id: msgspec.Raw = _NOTHING
    is_last_step: msgspec.Raw = _NOTHING
    this_func_call: msgspec.Raw = _NOTHING
    session_id: msgspec.Raw = _NOTHING
    prompt_cache_key: msgspec.Raw = _NOTHING
    prompt_cache_retention: msgspec.Raw = _NOTHING
    metadata: msgspec.Raw = _NOTHING
    vllm_xargs: msgspec.Raw = _NOTHING
    kv_transfer_params: msgspec.Raw = _NOTHING


class _Marked(msgspec.Struct):
    """Where Anthropic's cache marks may be; the longest part of a body, so read only if needed."""

    cache_control: Any = None
    system: Any = None
    messages: Any = None
    tools: Any = None


MARK = b'"cache_control"'  # a quote inside a text is escaped, so this is a member's name or value

_decoder = msgspec.json.Decoder(_Body)
_marked_decoder = msgspec.json.Decoder(_Marked)


def rewrite(body: bytes, headers: Mapping[str, str], path: str) -> bytes | None:
    """Return the body with `kv_transfer_params.continuum` completed, None to leave it alone.

    The client's own bytes stay as they are and one member is appended. Where the client sent
    `kv_transfer_params` itself, that repeats it with what is added: of two members of one name
    the last counts, for vLLM's parser (Python's) as for ours.
    """
    try:
        fields = _read_fields(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        _refuse_odd(body)
        return None
    sent = fields["kv_transfer_params"]
    params = {} if sent is None else sent
    said = params.get("continuum") if isinstance(params, dict) else 0
    said = {} if said is None else said
    if not isinstance(said, dict):
        return None  # too long, or the client's own mistake: vLLM answers it
    _refuse_params(params, fields["vllm_xargs"])
    added = _additions(fields, params, said, headers, path)
    keep_s = _keep_s(body, fields["prompt_cache_retention"])
    if keep_s is not None and "keep_s" not in said:
        added["keep_s"] = keep_s
    if not added:
        return None
    return _append_member(body, {**params, "continuum": {**said, **added}})


def _read_fields(body: bytes) -> Fields:
    """The values of the fields we look at; UNSET, which is no id and no hint, if too long."""
    raw = _decoder.decode(body)
    return {name: _value(getattr(raw, name)) for name in _Body.__struct_fields__}


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if len(raw) <= MAX_FIELD_BYTES else msgspec.UNSET


def _refuse_odd(body: bytes) -> None:
    """Look at a body that vLLM reads and msgspec does not: NaN, half of a surrogate pair."""
    if len(body) > MAX_ODD_BYTES:
        return
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(request, dict):
        return
    _refuse_params(request.get("kv_transfer_params"), request.get("vllm_xargs"))
    carried = {
        name: request.get(name) for name in ("kv_transfer_params", "vllm_xargs", "session_id")
    }
    try:
        json.dumps(carried, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnsendableError(
            f"{', '.join(carried)}: one of them has half of a surrogate pair (\\ud800 to \\udfff), "
            "which UTF-8 cannot say; send whole characters."
        ) from None


def _refuse_params(params: Any, xargs: Any) -> None:
    """vLLM (from 0.32) looks into the parameters in xargs as if they were an object."""
    instead = xargs.get("kv_transfer_params") if isinstance(xargs, dict) else None
    if not params and instead and not isinstance(instead, dict):
        raise UnsendableError("vllm_xargs.kv_transfer_params is no JSON object; send one, or none.")


def _append_member(body: bytes, params: Fields) -> bytes:
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"kv_transfer_params":', json.dumps(params).encode(), b"}"))


def _additions(
    body: Fields, params: Fields, said: Fields, headers: Mapping[str, str], path: str
) -> Fields:
    """Return the continuum fields the request implies and the client did not write itself."""
    client = _client_fields(body)
    xargs = _client_fields(body["vllm_xargs"]) if isinstance(body["vllm_xargs"], dict) else {}
    if path == MESSAGES_PATH:
        client |= xargs
    hint = params.get("agent_hint")
    explicit = "program" in said or "source" in said
    explicit = explicit or (isinstance(hint, dict) and read_agent_hint(hint)[0] is not None)
    if explicit or ("program" in xargs and path != MESSAGES_PATH):
        found: Fields = {}  # identify reads those by itself
    elif "program" in client:
        found = {name: client[name] for name in ("program", "source")}
    else:
        found = _session_fields(body, headers) or read_vendors(headers, body)
    found |= {name: client[name] for name in ("final", "tools") if name in client}
    return {name: value for name, value in found.items() if name not in said}


def _keep_s(body: bytes, retention: Any) -> float | None:
    marked: list[Any] = []
    if len(body) <= MAX_MARKED_BYTES and MARK in body:
        try:
            found = _marked_decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return None
        marked = [found.cache_control, found.system, found.messages, found.tools]
    return read_keep_s(retention, *marked)


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


def _headers(scope: Scope) -> dict[str, str]:
    """Header values by lower-case name; of repeated ones the first."""
    found: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _generating_path(scope: Scope) -> str:
    """Return which generating API a POST is for, "" if none."""
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    return path if scope.get("method") == "POST" and path in PATHS else ""


def _has_json_body(headers: Mapping[str, str]) -> bool:
    """Whether the body is one JSON text of known, moderate size."""
    media_type = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    length = headers.get("content-length", "")
    known = length.isascii() and length.isdigit() and len(length) < 12
    plain = "content-encoding" not in headers and "transfer-encoding" not in headers
    return media_type == "application/json" and plain and known and int(length) <= MAX_BODY_BYTES
