"""ASGI middleware: carries identities that vLLM's front end drops into kv_transfer_params.

    vllm serve MODEL ... --middleware continuum_connector.middleware.ProgramMiddleware

Optional. vLLM parses a request into its own fields and drops the rest before a connector can
see it: top-level `job_id`, agents' headers, `prompt_cache_key`, `metadata`. On the generating APIs
this adds them as `kv_transfer_params.continuum`, which all of them pass on (vLLM 0.26-0.33;
`vllm_xargs` does not survive /v1/messages before 0.29). What the client put there itself is never
changed. A request that would fail on its way to vLLM's engine, and be answered with 500, is
answered with 400 and a sentence. The middleware has no state: any number of API servers may run it.

All of it runs on the event loop. A thread would not help, because a parser keeps the interpreter
to itself. So its cost has bounds, in bytes and in objects built; what is above them passes as it
came, and is counted (continuum:unread_bodies).

Endpoint: a middleware that answers one path, for an operator with a key (*_endpoint.py).
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import msgspec

from continuum_connector.config import ADMIN_KEY, own_headers
from continuum_connector.errors import ConfigError
from continuum_connector.observe.account import UNREAD_BODIES
from continuum_connector.programs.continuation import digests
from continuum_connector.programs.identify import Fields, read_carried

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Note = Callable[[str], None]

MESSAGES_PATH = "/v1/messages"
PATHS = frozenset(  # the last three: tokens in and out, SageMaker's, Cohere's
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_PATH),
        *("/inference/v1/generate", "/invocations", "/cohere/v2/chat"),
    }
)
# A body that we read is walked once, in C, at 5 ms per MiB of the worst JSON, an eighth of what
# vLLM's own parser takes. Python objects are built from parts of it; vLLM builds them from all:
MAX_BODY_BYTES = 2**23  # longer bodies pass unread
MAX_FIELD_BYTES, MAX_FIELD_COST = 2**18, 2**16  # of a field that we read, larger ones do not count
MAX_PARTS_BYTES = 2**19  # of a body that is walked again, to tell where prompts differ
MAX_ODD_BYTES = 2**20  # of a body that is no strict JSON
MAX_BODY_COST = 2**18  # of that one: 3 MiB of C++ code, 7 of Python
CONTAINER_COST = 8  # building an object or a list costs as much as so many other values


class UnsendableError(ValueError):
    """A request that vLLM accepts, cannot hand to its engine, and would answer with 500."""


class ProgramMiddleware:
    """Adds identity to requests; anything it does not understand passes byte for byte."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._count = unread_bodies()
        self._own: tuple[str, ...] | None = None  # None until a request shows the config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = _headers(scope)
            path = _generating_path(scope)
            if path and _is_json(headers):
                if why := _why_unread(headers):
                    self._count(why)
                else:
                    if self._own is None:
                        self._own = own_headers(scope)
                    scope = dict(scope)
                    receive = _RewrittenBody(scope, headers, path, receive, self._count, self._own)
        await self.app(scope, receive, send)


@functools.cache  # a registry takes a name once; an application may be built twice
def unread_bodies() -> Note:
    """Return what counts one more body, by reason, in this API server's part of /metrics."""
    from prometheus_client import Counter  # vLLM's server has it; `continuum check` may not

    metric = UNREAD_BODIES
    family = Counter(metric.full_name, metric.help, [metric.label])
    counts = {why: family.labels(why) for why in metric.values}
    return lambda why: counts[why].inc()


class _RewrittenBody:
    """A `receive` whose request body has been rewritten; later messages pass through.

    It reads nothing before the application does: vLLM checks the API key further in, and a
    stranger must not make us buffer a body. It holds the pieces of one body up to MAX_BODY_BYTES
    and hands them on one by one as the application asks. Messages after the body are the server's
    own, so a client's disconnect still aborts its request.
    """

    def __init__(
        self,
        scope: Scope,
        headers: Mapping[str, str],
        path: str,
        receive: Receive,
        count: Note,
        own: Sequence[str],
    ) -> None:
        self._scope = scope
        self._own = own
        self._headers = headers
        self._path = path
        self._receive = receive
        self._count = count
        self._pieces: deque[bytes] = deque()
        self._is_complete = False  # the body ends with the pieces
        self._after: Message | None = None  # what came in place of a piece
        self._started = False

    async def __call__(self) -> Message:
        if not self._started:
            self._started = True
            await self._read()
        if self._pieces:
            piece = self._pieces.popleft()
            more = bool(self._pieces) or not self._is_complete
            return {"type": "http.request", "body": piece, "more_body": more}
        if self._after is not None:
            message, self._after = self._after, None
            return message
        return await self._receive()

    async def _read(self) -> None:
        """Collect the body, and rewrite it if that adds something."""
        size = 0
        while not self._is_complete:
            message = await self._receive()
            if message["type"] != "http.request":
                self._after = message
                return
            piece = message.get("body", b"")
            self._pieces.append(piece)
            self._is_complete = not message.get("more_body", False)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                self._count("long")
                return
        body = b"".join(self._pieces)
        skipped: list[str] = []
        try:
            rewritten = rewrite(body, self._headers, self._path, skipped.append, self._own)
        except UnsendableError as error:
            from fastapi import HTTPException  # vLLM's server has it; `continuum check` may not

            raise HTTPException(400, str(error)) from None
        if skipped:
            self._count("in_part")
        if rewritten is not None:
            self._replace(rewritten)

    def _replace(self, body: bytes) -> None:
        self._pieces = deque([body])
        self._scope["headers"] = [
            (name, str(len(body)).encode() if name.lower() == b"content-length" else value)
            for name, value in self._scope["headers"]
        ]


# The top-level body fields that we look at. They are read as they came: a body is walked once, in
# C, and no objects are built from it.
_FIELDS = (
    *("job_id", "program_id", "is_last_step", "this_func_call", "session_id", "prompt_cache_key"),
    *("litellm_session_id", "conversation", "metadata", "client_metadata", "vllm_xargs"),
    "kv_transfer_params",
)
_NOTHING = msgspec.Raw(b"null")
_Body = msgspec.defstruct("_Body", [(name, msgspec.Raw, _NOTHING) for name in _FIELDS])
_decoder = msgspec.json.Decoder(_Body)
# Python reads a number that is hard to round in 0.6 us, msgspec in 18
_field_decoder = msgspec.json.Decoder(float_hook=float)


def rewrite(
    body: bytes,
    headers: Mapping[str, str],
    path: str,
    skip: Note = lambda _part: None,
    own: Sequence[str] = (),
) -> bytes | None:
    """Return the body with `kv_transfer_params.continuum` completed, None to leave it alone.

    The client's own bytes stay as they are, and one member is appended. If the client itself sent
    `kv_transfer_params`, the new member repeats it with what is added: of two members of one name
    the last counts, for vLLM's parser (Python's) as for ours. `skip` gets what is not read; `own`
    are the operator's headers for ids.
    """
    try:
        fields = _read_fields(body, skip)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        _refuse_odd(body, skip)
        return None
    sent = fields["kv_transfer_params"]
    params = {} if sent is None else sent
    said = params.get("continuum") if isinstance(params, dict) else 0
    said = {} if said is None else said
    if not isinstance(said, dict):
        return None  # not read, or the client's own mistake: vLLM answers it
    _refuse_params(params, fields["vllm_xargs"])
    added = read_carried(fields, params, said, headers, path == MESSAGES_PATH, own)
    if not added:
        return None
    if "program" in added and not _costs_more(body, MAX_PARTS_BYTES, MAX_FIELD_COST):
        added |= {"parts": parts} if (parts := digests(body)) else {}
    return _append_member(body, {**params, "continuum": {**said, **added}})


def _read_fields(body: bytes, skip: Note) -> Fields:
    """The values of the fields that we look at; for those not read UNSET, no id and no hint."""
    raw = _decoder.decode(body)
    found: Fields = {}
    for name in _FIELDS:
        text = bytes(getattr(raw, name))
        if _costs_more(text, MAX_FIELD_BYTES, MAX_FIELD_COST):
            skip(name)
            found[name] = msgspec.UNSET
        else:
            found[name] = _field_decoder.decode(text)
    return found


def _costs_more(text: bytes, max_bytes: int, max_cost: int) -> bool:
    """Whether building Python objects from a JSON text costs more than it may. Every value has a
    comma or a bracket before it; those inside strings count, too, as they are not told apart."""
    if len(text) > max_bytes:
        return True
    containers = text.count(b"{") + text.count(b"[")
    return CONTAINER_COST * containers + text.count(b",") > max_cost


def _refuse_odd(body: bytes, skip: Note) -> None:
    """Look at a body that vLLM reads and msgspec does not: NaN, half of a surrogate pair."""
    if _costs_more(body, MAX_ODD_BYTES, MAX_BODY_COST):
        skip("body")
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
    """Refuse parameters in xargs that are no object; vLLM (from 0.32) reads them as one."""
    instead = xargs.get("kv_transfer_params") if isinstance(xargs, dict) else None
    if not params and instead and not isinstance(instead, dict):
        raise UnsendableError("vllm_xargs.kv_transfer_params is no JSON object; send one, or none.")


def _append_member(body: bytes, params: Fields) -> bytes:
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"kv_transfer_params":', json.dumps(params).encode(), b"}"))


def _headers(scope: Scope) -> dict[str, str]:
    """Header values by lower-case name; the first of those that are repeated."""
    found: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _generating_path(scope: Scope) -> str:
    """Return which generating API a POST is for, "" if none."""
    path = path_of(scope)
    return path if scope.get("method") == "POST" and path in PATHS else ""


def _is_json(headers: Mapping[str, str]) -> bool:
    media_type = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    return media_type == "application/json"


def _why_unread(headers: Mapping[str, str]) -> str:
    """Return why the body is not to be held, "" if it may be: vLLM decompresses nothing.

    A body that does not say how long it is may be held, too, up to MAX_BODY_BYTES, because gateways
    that look into bodies send them on in chunks.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        return "compressed"
    length = headers.get("content-length", "")
    is_known = length.isascii() and length.isdigit()
    return "long" if is_known and (len(length) > 11 or int(length) > MAX_BODY_BYTES) else ""


# --- endpoints for an operator ----------------------------------------------------------------
class RequestError(Exception):
    """The request ends here: with this status, and a sentence that says what to do."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


def engine_of(scope: Scope, so: str) -> Any:
    """vLLM's engine client, where its API server keeps it (v1/engine/async_llm.py); without one a
    RequestError with what follows (`so`)."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if client is None:
        raise RequestError(503, f"no engine is behind this server, so {so}")
    return client


class Endpoint(ABC):
    """Answers `path` for clients that have the key; everything else passes untouched. No server
    starts without what `read_key` needs. It has a key of its own, because vLLM's --api-key guards
    other paths and is checked only after us."""

    path: ClassVar[str]
    methods: ClassVar[Mapping[str, str]]  # what each is for

    def __init__(self, app: App) -> None:
        self.app = app
        self._refusal: ConfigError | None = None
        try:
            self._key = self.read_key(os.environ)
        except ConfigError as error:
            self._refusal = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._refusal is not None:
            await _refuse(self._refusal, scope, send)
        elif scope["type"] == "http" and self.serves(path_of(scope)):
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @classmethod
    def name(cls) -> str:
        """What --middleware is given."""
        return f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def read_key(cls, environ: Mapping[str, str]) -> bytes:
        """The operator's key with its bytes unchanged, UTF-8 or not; ConfigError if there is none,
        or if something else is missing."""
        key = environ.get(ADMIN_KEY, "").strip()
        if not key:
            raise ConfigError(
                f"{ADMIN_KEY} is empty, so anybody could use {cls.path}, and the server stops; set "
                f"a secret, or leave out `--middleware {cls.name()}`"
            )
        return os.fsencode(key)

    def serves(self, path: str) -> bool:
        return path == self.path

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        """Do as the request says, and return what is sent back as JSON. RequestError says why not;
        ConnectionError: the client left before its body was complete."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            if scope["method"] not in self.methods:
                what = ", ".join(f"{method} to {aim}" for method, aim in self.methods.items())
                raise RequestError(405, f"use {what}", allow=", ".join(self.methods))
            answer = await self.answer(scope, receive)
        except RequestError as error:
            await _send_json(send, error.status, {"error": str(error)}, error.headers)
        except ConnectionError:
            return
        else:
            await _send_json(send, 200, answer, {})

    def _check_key(self, scope: Scope) -> None:
        sent = (value for name, value in scope["headers"] if name.lower() == b"authorization")
        scheme, _, said = next(sent, b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(said.strip(), self._key):
            sentence = f"send the key of {ADMIN_KEY}: `Authorization: Bearer KEY`"
            raise RequestError(401, sentence, **{"www-authenticate": "Bearer"})


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The body, or the beginning of a longer one; ConnectionError if the client left."""
    body, more = b"", True
    while more and len(body) <= max_bytes:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def path_of(scope: Scope) -> str:
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


async def _refuse(refusal: ConfigError, scope: Scope, send: Send) -> None:
    """Stop the server at its start. An exception alone would not: uvicorn goes on without us."""
    if scope["type"] != "lifespan":
        raise refusal
    await send({"type": "lifespan.startup.failed", "message": f"ConfigError: {refusal}"})


async def _send_json(
    send: Send, status: int, answer: Mapping[str, Any], headers: Mapping[str, str]
) -> None:
    body = json.dumps(answer).encode() + b"\n"
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
