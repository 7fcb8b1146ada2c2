"""ProgramMiddleware: recorded requests of each client in, the identity the engine sees out."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from continuum_connector import middleware
from continuum_connector.config import CONNECTOR_NAME, ID_HEADERS, own_headers
from continuum_connector.middleware import (
    CONTAINER_COST,
    MAX_BODY_BYTES,
    MAX_BODY_COST,
    MAX_FIELD_BYTES,
    MAX_FIELD_COST,
    MAX_ODD_BYTES,
    MAX_PARTS_BYTES,
    PATHS,
    ProgramMiddleware,
    UnsendableError,
    rewrite,
)
from continuum_connector.observe.account import UNREAD_BODIES
from continuum_connector.programs.continuation import DIGITS
from continuum_connector.programs.identify import identify
from continuum_connector.programs.program import Hints, Identity, IdentitySource

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CLIENT, SESSION, VENDOR = IdentitySource.CLIENT, IdentitySource.SESSION, IdentitySource.VENDOR
JSON = {"content-type": "application/json"}

Message = dict[str, Any]


class App:
    """Stands for vLLM: reads a body to its end, then waits for the client to go away."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = reads
        self.body = b""
        self.messages: list[Message] = []
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = self.reads
        while more:
            message = await receive()
            self.messages.append(message)
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        self.headers = scope["headers"]
        if self.reads:
            self.messages.append(await receive())
        await send({"type": "http.response.start", "status": 200})

    def header(self, name: str) -> str:
        return dict(self.headers)[name.encode()].decode()


def scope_for(path: str, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": path, "headers": pairs, **more}


def post(
    path: str,
    body: bytes | list[bytes],
    headers: dict[str, str] | None = None,
    app: App | None = None,
    server: Any = None,
    **scope: Any,
) -> App:
    """Send one request through the middleware, in as many messages as `body` has parts."""
    app = app or App()
    scope |= {} if server is None else {"app": server}
    parts = [body] if isinstance(body, bytes) else body
    given = {**JSON, "content-length": str(sum(map(len, parts))), **(headers or {})}
    queue: list[Message] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    queue.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return queue.pop(0)

    async def send(_message: Message) -> None:
        pass

    asyncio.run(ProgramMiddleware(app)(scope_for(path, given, **scope), receive, send))
    return app


def who(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Identity | None:
    """What the connector identifies, on a vLLM that hands it kv_transfer_params and xargs."""
    raw = json.dumps(body).encode()
    lowered = {name.lower(): value for name, value in (headers or {}).items()}
    sent = json.loads(rewrite(raw, lowered, path) or raw)
    return identify(sent.get("kv_transfer_params"), sent.get("vllm_xargs"), None)


def hint(**fields: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


S, T, P = "0195f3a2-session", "0195f3a2-thread", "0195f3a2-parent"
CLAUDE = "user_9f8e_account_1c2d_session_0195f3a2-session"
RECORDED: list[tuple[str, str, dict[str, str], dict[str, Any], Identity | None]] = [
    ("Claude Code", MESSAGES, {"X-Claude-Code-Session-Id": S}, {"metadata": {"user_id": CLAUDE}},
     Identity(f"claude-code:{S}", VENDOR)),
    ("Claude Code behind a proxy", MESSAGES, {}, {"metadata": {"user_id": CLAUDE}},
     Identity(f"claude-code:{S}", VENDOR)),
    ("Claude Code, JSON metadata", MESSAGES, {},
     {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": S})}},
     Identity(f"claude-code:{S}", VENDOR)),
    ("Claude Code subagent", MESSAGES,
     {"x-claude-code-session-id": S, "x-claude-code-agent-id": "a1"}, {},
     Identity(f"claude-code:{S}/a1", VENDOR, Hints(parent=f"claude-code:{S}"))),
    ("Claude Code nested subagent", MESSAGES,
     {"x-claude-code-session-id": S, "x-claude-code-agent-id": "a2",
      "x-claude-code-parent-agent-id": "a1"}, {},
     Identity(f"claude-code:{S}/a2", VENDOR, Hints(parent=f"claude-code:{S}/a1"))),
    ("Claude Code compaction", MESSAGES,
     {"x-claude-code-session-id": S, "x-claude-code-request-class": "compaction",
      "x-claude-code-compaction": "auto"}, {},
     Identity(f"claude-code:{S}", VENDOR, Hints(compaction=True))),
    ("Claude Code side request", MESSAGES,
     {"x-claude-code-session-id": S, "x-claude-code-request-class": "auxiliary"}, {},
     Identity(f"claude-code:{S}/auxiliary", VENDOR, Hints(parent=f"claude-code:{S}"))),
    ("Codex", RESPONSES,
     {"session-id": S, "thread-id": T, "x-client-request-id": T,
      "x-codex-turn-metadata": '{"request_kind":"turn"}'}, {"prompt_cache_key": T},
     Identity(f"codex:{T}", VENDOR)),
    ("Codex, older", RESPONSES, {"conversation_id": T, "session_id": T}, {},
     Identity(f"codex:{T}", VENDOR)),
    ("Codex subagent", RESPONSES,
     {"session-id": S, "thread-id": T, "x-codex-parent-thread-id": P,
      "x-openai-subagent": "collab_spawn"}, {"prompt_cache_key": T},
     Identity(f"codex:{T}", VENDOR, Hints(parent=f"codex:{P}"))),
    ("Codex compaction", RESPONSES,
     {"thread-id": T, "x-codex-turn-metadata": '{"request_kind":"compaction","turn_id":"u"}'}, {},
     Identity(f"codex:{T}", VENDOR, Hints(compaction=True))),
    ("Codex behind a gateway that drops its headers", RESPONSES, {},
     {"prompt_cache_key": T, "client_metadata": {
         "session_id": S, "thread_id": T, "x-codex-parent-thread-id": P, "originator": "codex_exec",
         "x-codex-turn-metadata": '{"request_kind":"turn","turn_id":"u"}'}},
     Identity(f"codex:{T}", VENDOR, Hints(parent=f"codex:{P}"))),
    ("Codex, the turn's metadata alone, a compaction", RESPONSES, {},
     {"client_metadata": {"x-codex-turn-metadata": json.dumps(
         {"session_id": S, "thread_id": T, "parent_thread_id": P, "request_kind": "compaction"})}},
     Identity(f"codex:{T}", VENDOR, Hints(parent=f"codex:{P}", compaction=True))),
    ("Codex compaction, told in the body", RESPONSES, {"thread-id": T},
     {"client_metadata": {"thread_id": T, "x-openai-subagent": "compact"}},
     Identity(f"codex:{T}", VENDOR, Hints(compaction=True))),
    ("another client's client_metadata", RESPONSES, {},
     {"client_metadata": {"session_id": S, "user": "alice"}}, None),
    ("X-LLM-Session-ID", CHAT, {"X-LLM-Session-ID": S, "X-LLM-Parent-Session-ID": P},
     {"prompt_cache_key": "app"}, Identity(f"llm:{S}", VENDOR, Hints(parent=f"llm:{P}"))),
    ("X-Conversation-ID", CHAT, {"x-conversation-id": S}, {"prompt_cache_key": "app"},
     Identity(f"conversation:{S}", VENDOR)),
    ("X-Hermes-Session-Id", CHAT, {"X-Hermes-Session-Id": S}, {"prompt_cache_key": "app"},
     Identity(f"hermes:{S}", VENDOR)),
    ("Helicone", CHAT, {"Helicone-Session-Id": S, "Helicone-Session-Path": "/a"}, {},
     Identity(f"helicone:{S}", VENDOR)),
    ("metadata.session_id", CHAT, {}, {"metadata": {"session_id": S, "parent_session_id": P}},
     Identity(f"metadata:{S}", VENDOR, Hints(parent=f"metadata:{P}"))),
    ("OpenCode", CHAT,
     {"x-session-id": S, "x-opencode-session": S, "x-parent-session-id": P}, {},
     Identity(f"session:{S}", SESSION, Hints(parent=f"session:{P}"))),
    ("OpenCode, affinity", CHAT, {"x-session-affinity": S, "x-parent-session-id": P}, {},
     Identity(f"opencode:{S}", VENDOR, Hints(parent=f"opencode:{P}"))),
    ("OpenHands", CHAT, {"x-litellm-session-id": S},
     {"prompt_cache_key": S, "prompt_cache_retention": "24h"},
     Identity(f"litellm:{S}", VENDOR)),
    ("OpenHands, body only", CHAT, {}, {"prompt_cache_key": S}, Identity(f"cache-key:{S}", VENDOR)),
    ("mini-swe-agent", CHAT, {"user-agent": "OpenAI/Python"}, {"temperature": 0.0}, None),
    ("Harbor", CHAT, {"X-Session-ID": S}, {}, Identity(f"session:{S}", SESSION)),
    ("Hermes", CHAT, {"X-Agent-Hint": hint(session_id=S, parent_session_id=P)},
     {"prompt_cache_key": "k"}, Identity(f"hint:{S}", VENDOR, Hints(parent=f"hint:{P}"))),
    ("DeepSeek harness", CHAT,
     {"x-deepseek-harness-user-id": "u", "x-deepseek-harness-session-id": S,
      "x-deepseek-harness-parent-session-id": P}, {},
     Identity(f"deepseek:{S}", VENDOR, Hints(parent=f"deepseek:{P}"))),
    ("DeepSeek compaction", CHAT,
     {"x-deepseek-harness-session-id": S, "x-deepseek-harness-compact": "1"}, {},
     Identity(f"deepseek:{S}", VENDOR, Hints(compaction=True))),
    ("LangChain", CHAT, {}, {"user": "alice", "safety_identifier": "bob"}, None),
    ("uni-agent", COMPLETIONS, {"x-session-id": "other"},
     {"kv_transfer_params": {"agent_hint": {"trajectory_id": T, "kv_priority": 1}}},
     Identity(f"hint:{T}", IdentitySource.CONTINUUM, Hints(unread=("kv_priority",)))),
    ("ThunderAgent", CHAT, {}, {"program_id": "p"}, Identity("job:p", CLIENT)),
    ("Continuum", CHAT, {},
     {"job_id": "j", "is_last_step": True, "this_func_call": "ls", "last_func_call": "cd"},
     Identity("job:j", CLIENT, Hints(final=True, tools=("ls",)))),
    ("Continuum, xargs", CHAT, {"x-session-id": "s"},
     {"vllm_xargs": {"job_id": "j", "is_last_step": 0}},
     Identity("job:j", CLIENT, Hints(final=False))),
    ("Continuum without job", CHAT, {"x-session-id": "s"}, {"job_id": None, "is_last_step": True},
     Identity("session:s", SESSION, Hints(final=True))),
    ("Dynamo", CHAT,
     {"X-Dynamo-Session-ID": S, "X-Dynamo-Parent-Session-ID": P, "X-Dynamo-Session-Final": "true",
      "x-claude-code-session-id": "other"}, {},
     Identity(f"dynamo:{S}", VENDOR, Hints(parent=f"dynamo:{P}", final=True))),
    ("gateway", CHAT, {"x-multi-turn-session-id": S, "x-correlation-id": "c"}, {},
     Identity(f"multi-turn:{S}", VENDOR)),
    ("correlation id", CHAT, {"x-correlation-id": S}, {}, Identity(f"correlation:{S}", VENDOR)),
    ("Goose", CHAT, {"agent-session-id": "20261130_2"}, {"prompt_cache_key": "app"},
     Identity("goose:20261130_2", VENDOR)),
    ("Open WebUI", CHAT, {"X-OpenWebUI-User-Id": "u", "X-OpenWebUI-Chat-Id": S,
                          "X-OpenWebUI-Message-Id": "m"}, {}, Identity(f"openwebui:{S}", VENDOR)),
    ("Roo Code", CHAT, {"X-Roo-Task-ID": T}, {}, Identity(f"task:{T}", VENDOR)),
    ("Kilo Code", CHAT, {"X-KiloCode-TaskId": T, "X-KILOCODE-EDITORNAME": "vscode"}, {},
     Identity(f"task:{T}", VENDOR)),
    ("Cline", CHAT, {"X-Task-ID": T}, {}, Identity(f"task:{T}", VENDOR)),
    ("Mistral Vibe", CHAT, {"x-affinity": S}, {}, Identity(f"affinity:{S}", VENDOR)),
    ("xAI's header", CHAT, {"x-grok-conv-id": S}, {}, Identity(f"affinity:{S}", VENDOR)),
    ("SGLang's router", CHAT, {"X-SMG-Routing-Key": S}, {}, Identity(f"affinity:{S}", VENDOR)),
    ("LiteLLM, body", CHAT, {}, {"litellm_session_id": S}, Identity(f"litellm:{S}", VENDOR)),
    ("Responses' conversation", RESPONSES, {}, {"conversation": {"id": "conv_1"}},
     Identity("conversation:conv_1", VENDOR)),
    ("Responses' conversation, its id alone", RESPONSES, {}, {"conversation": "conv_1"},
     Identity("conversation:conv_1", VENDOR)),
    ("Cursor", CHAT, {}, {"user": "u", "metadata": {"cursorConversationId": S,
                                                    "cursorRequestId": "r"}},
     Identity(f"metadata:{S}", VENDOR)),
    ("Qwen Code", CHAT, {}, {"metadata": {"sessionId": S, "promptId": f"{S}########3"}},
     Identity(f"metadata:{S}", VENDOR)),
    ("Langfuse", CHAT, {}, {"metadata": {"langfuse_session_id": S, "langfuse_user_id": "u"}},
     Identity(f"metadata:{S}", VENDOR)),
    ("LangGraph", CHAT, {}, {"metadata": {"session_id": None, "thread_id": T}},
     Identity(f"metadata:{T}", VENDOR)),
    ("W3C baggage", CHAT, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                           "baggage": "user.id=u, session.id = run%2017;p=1,x"}, {},
     Identity("baggage:run 17", VENDOR)),
    ("a trace alone", CHAT, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-1-01",
                             "baggage": ",=;%zz,session.id=,thread_id=null"}, {}, None),
    ("an object for an id", CHAT, {"x-session-id": "[object Object]"}, {"session_id": " NULL"},
     None),
    ("an id of zeros", CHAT, {"x-session-id": "00000000-0000-0000-0000-000000000000"}, {}, None),
    ("a field for an id that holds none", MESSAGES, {"x-claude-code-session-id": S},
     {"is_last_step": True, "kv_transfer_params": {
         "continuum": {"program": None, "final": None, "ttl_s": "soon"}}},
     Identity(f"claude-code:{S}", VENDOR, Hints(final=True, unread=("ttl_s",)))),
    ("an id of no kind", CHAT, {"x-session-id": S},
     {"kv_transfer_params": {"continuum": {"program": {"id": 1}, "parent": "p"}}},
     Identity(f"session:{S}", SESSION, Hints(parent="session:p"))),
    ("body session_id", RESPONSES, {"x-session-id": "header"}, {"session_id": S},
     Identity(f"session:{S}", SESSION)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "headers", "body", "expected"), [r[1:] for r in RECORDED], ids=[r[0] for r in RECORDED]
)
def test_recorded_requests_of_each_client(
    path: str, headers: dict[str, str], body: dict[str, Any], expected: Identity | None
) -> None:
    assert who(path, {"model": "m", **body}, headers) == expected


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("parts", [1, 3])
def test_a_member_is_appended_and_the_clients_bytes_stay(path: str, parts: int) -> None:
    body = b'{ "model":"m", "x": 1.10, "x": 1e400, "job_id": "j", "s": "\\u00e9\xc3\xa9" }\r\n'
    step = -(-len(body) // parts)
    app = post(path, [body[i : i + step] for i in range(0, len(body), step)], {"X-Other": "1"})
    tail = b',"kv_transfer_params":{"continuum": {"program": "j", "source": "job_id"}}}'
    assert app.body == body.rstrip()[:-1].rstrip() + tail
    assert app.header("content-length") == str(len(app.body))
    assert app.header("X-Other") == "1"


def test_the_clients_disconnect_reaches_the_application_after_the_body() -> None:
    for body in (b'{"job_id":"j"}', b'{"model":"m"}', b"junk"):
        assert post(CHAT, body).messages[-1] == {"type": "http.disconnect"}


def test_a_disconnect_inside_the_body_is_passed_on() -> None:
    app = App()
    queue = [
        {"type": "http.request", "body": b'{"job', "more_body": True},
        {"type": "http.disconnect"},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return queue.pop(0)

    headers = {**JSON, "content-length": "14"}
    asyncio.run(ProgramMiddleware(app)(scope_for(CHAT, headers), receive, receive_nothing))
    assert [m["type"] for m in app.messages] == ["http.request", *["http.disconnect"] * 2]
    assert app.body == b'{"job'


async def receive_nothing(_message: Message) -> None:
    pass


def test_nothing_is_read_before_the_application_asks() -> None:
    """An application that refuses the API key answers without reading the body."""
    app = App(reads=False)

    async def receive() -> Message:
        raise AssertionError("read ahead")

    headers = {**JSON, "content-length": "14"}
    asyncio.run(ProgramMiddleware(app)(scope_for(CHAT, headers), receive, receive_nothing))
    assert app.headers


IDENTIFIED = {"X-Dynamo-Session-ID": "d"}
UNTOUCHED: list[tuple[str, bytes, dict[str, str], dict[str, Any]]] = [
    ("nobody said", b'{"model": "m"}', {}, {}),
    ("empty", b"", IDENTIFIED, {}),
    ("not JSON", b"job_id=1", IDENTIFIED, {}),
    ("cut off", b'{"job_id": "j"', IDENTIFIED, {}),
    ("array", b'[{"job_id": "j"}]', IDENTIFIED, {}),
    ("text", b'"job_id"', IDENTIFIED, {}),
    ("UTF-16", '{"job_id":"j"}'.encode("utf-16"), IDENTIFIED, {}),
    ("bad UTF-8", b'{"job_id":"\xff"}', IDENTIFIED, {}),
    ("deep", b'{"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}", IDENTIFIED, {}),
    ("form", b'{"job_id":"j"}', {"content-type": "text/plain"}, {}),
    ("no type", b'{"job_id":"j"}', {"content-type": ""}, {}),
    ("compressed", b'{"job_id":"j"}', {"content-encoding": "gzip"}, {}),
    ("too long", b'{"job_id":"j"}', {"content-length": str(2**27)}, {}),
    ("GET", b'{"job_id":"j"}', {}, {"method": "GET"}),
    ("other path", b'{"job_id":"j"}', {}, {"path": "/v1/embeddings"}),
    ("count tokens", b'{"job_id":"j"}', {}, {"path": "/v1/messages/count_tokens"}),
    ("junk job", b'{"job_id": {"a": [1]}, "is_last_step": "perhaps"}', {}, {}),
    ("junk metadata", b'{"metadata": [1], "prompt_cache_key": 1.5}', {}, {}),
    ("junk headers", b"{}", {"x-agent-hint": "%%%\xff", "x-session-id": " "}, {}),
    ("junk hint", b"{}", {"x-agent-hint": hint(session_id=None)}, {}),
    ("hint of no object", b"{}", {"x-agent-hint": base64.b64encode(b"[1]").decode()}, {}),
    ("params no object", b'{"kv_transfer_params": [1], "job_id": "j"}', {}, {}),
    ("continuum no object", b'{"kv_transfer_params": {"continuum": 1}, "job_id": "j"}', {}, {}),
    ("explicit", b'{"kv_transfer_params":{"continuum":{"program":"p"}}}', IDENTIFIED, {}),
    ("xargs", b'{"vllm_xargs": {"job_id": "j"}}', IDENTIFIED, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "headers", "scope"), [u[1:] for u in UNTOUCHED], ids=[u[0] for u in UNTOUCHED]
)
def test_what_adds_nothing_or_is_not_understood_passes_byte_for_byte(
    body: bytes, headers: dict[str, str], scope: dict[str, Any]
) -> None:
    path = scope.pop("path", CHAT)
    app = post(path, [body[:5], body[5:]], headers, **scope)
    assert app.body == body
    assert [m.get("body") for m in app.messages] == [body[:5], body[5:], None]
    given = {**JSON, "content-length": str(len(body)), **headers}
    assert app.headers == scope_for(path, given)["headers"]


def test_a_body_longer_than_it_claims_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES", 20)
    parts = [b'{"job_id": "j", ', b'"model": "m" ', b"}"]
    assert post(CHAT, parts, {"content-length": "10"}).body == b"".join(parts)


def test_what_the_client_wrote_is_never_changed() -> None:
    said = {"final": False, "ttl_s": 2, "program": "mine"}
    body = {"kv_transfer_params": {"other": [1], "continuum": said}, "job_id": "j"}
    headers = {"x-dynamo-session-id": "d", "x-dynamo-session-final": "1"}
    assert rewrite(json.dumps(body).encode(), headers, CHAT) is None
    body["is_last_step"], body["this_func_call"] = True, "ls"
    sent = json.loads(rewrite(json.dumps(body).encode(), headers, CHAT) or b"")
    added = {"continuum": {**said, "tools": ["ls"]}, "other": [1]}
    assert sent == {**body, "kv_transfer_params": added}


def test_a_named_conversation_carries_digests_of_its_parts() -> None:
    said = [{"role": "user", "content": each} for each in ("a", "b", "c")]
    body = {"messages": said, "tools": [{"name": "t"}], "session_id": "s"}

    def parts(**more: Any) -> str:
        sent = json.loads(rewrite(json.dumps(body | more).encode(), {}, CHAT) or b"")
        return str(sent["kv_transfer_params"]["continuum"].get("parts", ""))

    first, other = parts(), parts(tools=[{"name": "u"}])
    assert len(first) == 5 * DIGITS
    assert first[:DIGITS] != other[:DIGITS]
    assert first[DIGITS:] == other[DIGITS:]
    assert not parts(messages=said[:2])  # nothing is repeated yet
    assert not parts(messages=[*said, {"role": "user", "content": "x" * MAX_PARTS_BYTES}])


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"continuum": {}}])
def test_existing_params_are_kept_and_completed(params: Any) -> None:
    body = json.dumps({"kv_transfer_params": params, "job_id": "j", "n": 10**30}).encode()
    sent = json.loads(rewrite(body, {}, CHAT) or b"")
    added = {"program": "j", "source": "job_id"}
    assert sent["kv_transfer_params"] == {**(params or {}), "continuum": added}
    assert sent["n"] == 10**30


def test_xargs_are_carried_over_where_old_vllm_drops_them() -> None:
    body = b'{"vllm_xargs": {"job_id": "j", "is_last_step": 1}, "job_id": "other"}'
    sent = json.loads(rewrite(body, IDENTIFIED, MESSAGES) or b"")
    said = {"program": "j", "source": "job_id", "final": True}
    assert sent["kv_transfer_params"] == {"continuum": said}


def test_an_empty_object_gets_its_first_member() -> None:
    sent = rewrite(b" { } ", {"x-session-id": "s"}, CHAT)
    assert json.loads(sent or b"")["kv_transfer_params"]["continuum"]["program"] == "s"


def test_a_root_path_is_no_part_of_the_api_path() -> None:
    app = post("/proxy" + CHAT, b'{"job_id":"j"}', root_path="/proxy")
    assert b"kv_transfer_params" in app.body


def test_other_protocols_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_headers", None)
    app = App(reads=False)
    scope = {"type": "lifespan", "headers": []}
    asyncio.run(ProgramMiddleware(app)(scope, receive_nothing, receive_nothing))  # type: ignore[arg-type]


LONE = "a\ud800b"
UNSENDABLE: dict[str, dict[str, Any]] = {
    "lone surrogate, program": {"kv_transfer_params": {"continuum": {"program": LONE}}},
    "lone surrogate, member": {"kv_transfer_params": {LONE: 1}},
    "lone surrogate, the second": {"kv_transfer_params": {"a": "\udc00"}},
    "lone surrogate, xargs": {"vllm_xargs": {"a": [LONE]}},
    "lone surrogate, session": {"session_id": LONE},
    "params in xargs": {"vllm_xargs": {"kv_transfer_params": "p"}},
    "params in xargs, NaN": {"vllm_xargs": {"kv_transfer_params": ["p"]}, "x": float("nan")},
}
SENDABLE: dict[str, dict[str, Any]] = {
    "lone surrogate, not carried": {"job_id": LONE, "metadata": {"a": LONE}},
    "lone surrogate, prompt": {"prompt": LONE},
    "a pair": {"kv_transfer_params": {"a": "\U0001f600"}},
    "text that looks like one": {"kv_transfer_params": {"a": "\\ud800"}},
    "NaN": {"kv_transfer_params": {"continuum": {"ttl_s": float("nan")}}},
    "params beside xargs": {
        "vllm_xargs": {"kv_transfer_params": 1},
        "kv_transfer_params": {"a": 1},
    },
    "params in xargs": {"vllm_xargs": {"kv_transfer_params": {"a": 1}}},
    "no params in xargs": {"vllm_xargs": {"kv_transfer_params": None}},
}


@pytest.mark.parametrize("body", UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_vllm_cannot_hand_to_its_engine_is_refused_in_a_sentence(body: dict[str, Any]) -> None:
    with pytest.raises(UnsendableError, match="; send "):
        rewrite(json.dumps(body).encode(), {}, CHAT)


@pytest.mark.parametrize("body", SENDABLE.values(), ids=SENDABLE)
def test_what_vllm_answers_itself_passes(body: dict[str, Any]) -> None:
    assert rewrite(json.dumps(body).encode(), {}, CHAT) is None


def test_a_long_body_that_is_no_strict_json_passes_unread() -> None:
    body = {**UNSENDABLE["lone surrogate, session"], "x": "x" * MAX_ODD_BYTES}
    assert rewrite(json.dumps(body).encode(), {}, CHAT) is None


def test_a_continuum_of_null_says_nothing() -> None:
    body = {"kv_transfer_params": {"continuum": None}, "job_id": "a"}
    assert who(CHAT, body) == Identity("job:a", CLIENT)


MANY = b"[" + b"{}," * 1_500_000 + b"{}]"  # 4.5 MB, of which Python would make 100
HOSTILE = {  # the fields of a body -> what is appended, "" if it passes as it came
    "messages": (b'"job_id":"a","messages":%s' % MANY, "job_id"),
    "params": (b'"job_id":"a","kv_transfer_params":{"a":%s}' % MANY, ""),
    "agent hint": (b'"job_id":"a","kv_transfer_params":{"agent_hint":%s}' % MANY, ""),
    "metadata": (b'"job_id":"a","metadata":{"user_id":%s}' % MANY, "job_id"),
    "xargs": (b'"job_id":"a","vllm_xargs":{"job_id":%s}' % MANY, "job_id"),
    "an id": (b'"job_id":%s,"session_id":"a"' % MANY, "session_id"),
    "unknown": (b'"job_id":"a","x":%s,"kv_transfer_params":{}' % MANY, "job_id"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_built_of_a_body_but_what_we_add(name: str) -> None:
    fields, source = HOSTILE[name]
    body = b"{%s}" % fields
    tracemalloc.start()
    try:
        sent = rewrite(body, {}, CHAT)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(body)  # a copy, and one while it is made
    said = json.dumps({"continuum": {"program": "a", "source": source}}).encode()
    assert sent == (body[:-1] + b',"kv_transfer_params":' + said + b"}" if source else None)


def test_fields_are_read_up_to_their_bounds() -> None:
    num = (MAX_FIELD_BYTES - len(b'"7"')) // len(b"\\u0020")
    for spaces, key in ((num, "job:7"), (num + 1, "session:s")):
        body = b'{"session_id":"s","job_id":"%s7"}' % (b"\\u0020" * spaces)
        sent = json.loads(rewrite(body, {}, CHAT) or b"")
        found = identify(sent["kv_transfer_params"], None, None)
        assert found is not None
        assert found.key == key


# --- what is not read, and what reading may cost -----------------------------------------------
def unread() -> dict[str, float]:
    """What /metrics says by reason, where any."""
    name = f"{UNREAD_BODIES.full_name}_total"
    found = {why: REGISTRY.get_sample_value(name, {"reason": why}) for why in UNREAD_BODIES.values}
    return {why: value or 0.0 for why, value in found.items()}


def newly(before: dict[str, float]) -> dict[str, float]:
    return {why: n - before[why] for why, n in unread().items() if n != before[why]}


BOMB = gzip.compress(bytes(10**7), mtime=0)
JOB = b'{"job_id":"j"}'
UNREAD: list[tuple[str, bytes, dict[str, str]]] = [
    ("compressed", gzip.compress(JOB, mtime=0), {"content-encoding": "gzip"}),
    ("compressed", BOMB, {"content-encoding": "gzip"}),
    *(("compressed", JOB, {"Content-Encoding": how}) for how in ("br", "zstd", "gzip, br", "x")),
    ("long", JOB, {"content-length": str(MAX_BODY_BYTES + 1)}),
    ("long", JOB, {"content-length": "9" * 5_000}),
]  # fmt: skip


@pytest.mark.parametrize(("why", "body", "headers"), UNREAD)
def test_a_body_that_is_not_looked_at_passes_through_nobodys_hands_and_is_counted(
    why: str, body: bytes, headers: dict[str, str]
) -> None:
    before, seen = unread(), []

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        seen.append((scope, receive))

    given = {**JSON, "content-length": str(len(body)), **headers}
    scope = scope_for(CHAT, given)
    asyncio.run(ProgramMiddleware(app)(scope, receive_nothing, receive_nothing))  # type: ignore[arg-type]
    ((scope_seen, receive_seen),) = seen
    assert scope_seen is scope
    assert receive_seen is receive_nothing
    assert newly(before) == {why: 1.0}


def test_what_says_that_it_is_compressed_and_what_only_is_reach_the_application_as_they_came() -> (
    None
):
    for headers in ({"content-encoding": "gzip"}, {}):
        for body in (gzip.compress(JOB), BOMB):
            assert post(CHAT, [body[:9], body[9:]], headers).body == body


def test_nothing_is_counted_of_a_body_that_is_read_nor_where_none_is_wanted() -> None:
    before = unread()
    for plain in (
        *({}, {"content-encoding": "identity"}, {"Content-Encoding": " Identity"}),
        *({"transfer-encoding": "chunked"}, {"content-length": ""}, {"content-length": "\u00b2"}),
    ):
        assert b"continuum" in post(CHAT, [JOB[:5], JOB[5:]], plain).body
    post(CHAT, b'{"model":"m"}')
    post("/v1/embeddings", JOB, {"content-encoding": "gzip"})
    post(CHAT, JOB, {"content-type": "text/plain", "transfer-encoding": "chunked"})
    assert newly(before) == {}


def test_of_a_body_that_grows_past_the_bound_no_more_is_held_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES", 20)
    before, sent = unread(), 0
    taken: list[int] = []  # pieces asked of the client by the time each reached the application

    async def receive() -> Message:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"%08d" % sent, "more_body": sent < 9}

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        for number in range(1, 10):
            message = await receive()
            assert message["body"] == b"%08d" % number
            assert message["more_body"] is (number < 9)
            taken.append(sent)

    headers = {**JSON, "content-length": "14"}
    asyncio.run(ProgramMiddleware(app)(scope_for(CHAT, headers), receive, receive_nothing))
    assert taken == [3, 3, 3, 4, 5, 6, 7, 8, 9]
    assert newly(before) == {"long": 1.0}


def test_a_body_in_tiny_pieces_is_held_as_those_and_nothing_more() -> None:
    num, held = 50_000, 0

    async def receive() -> Message:
        receive.left -= 1  # type: ignore[attr-defined]
        more = receive.left > 0  # type: ignore[attr-defined]
        return {"type": "http.request", "body": bytes((65, 66)), "more_body": more}

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        nonlocal held
        before, _ = tracemalloc.get_traced_memory()
        await receive()
        held = tracemalloc.get_traced_memory()[0] - before

    receive.left = num  # type: ignore[attr-defined]
    headers = {**JSON, "content-length": str(2 * num)}
    tracemalloc.start()
    try:
        asyncio.run(ProgramMiddleware(app)(scope_for(CHAT, headers), receive, receive_nothing))
    finally:
        tracemalloc.stop()
    assert held < num * 64  # 35 bytes each, a place in a list; a message of their own: 250


def values(found: Any) -> Iterator[Any]:
    """Everything that was built for a decoded value."""
    pending = [found]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        pending += (
            value.values() if isinstance(value, dict) else value if type(value) is list else ()
        )


UNITS = {
    "objects": b"{}",
    "lists": b"[]",
    "numbers": b"1",
    "texts": b'""',
    "nested": b"[[[[[[[[]]]]]]]]",
    "members": b'{"a":1,"b":2,"c":[3]}',
}


def stuffed(unit: bytes, num_bytes: int) -> bytes:
    return b"[%s]" % b",".join([unit] * ((num_bytes - 200) // (len(unit) + 1)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("where", ["odd", "fields"])
def test_whatever_a_body_is_made_of_few_objects_are_built(
    unit: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is; vLLM's parser needs 0.1 s for a million of them."""
    weighed: list[int] = []

    def weighing(decode: Any) -> Any:
        def spy(text: Any) -> Any:
            found = decode(text)
            weighed.append(
                sum(CONTAINER_COST if type(v) in (dict, list) else 1 for v in values(found))
            )
            return found

        return spy

    field = middleware._field_decoder.decode
    monkeypatch.setattr(middleware, "_field_decoder", Spied(weighing(field)))
    monkeypatch.setattr(json, "loads", weighing(json.loads))
    names = [name.encode() for name in middleware._FIELDS]
    most = len(names) * MAX_FIELD_COST if where == "fields" else MAX_BODY_COST
    for short, size in ((2**16, 2**19), (MAX_FIELD_BYTES - 9, 2**20)):
        part, whole = stuffed(UNITS[unit], short), stuffed(UNITS[unit], size)
        body = {
            "odd": b'{"a":%s,"b":NaN}' % whole,
            "fields": b"{%s}" % b",".join(b'"%s":{"a":%s}' % (name, part) for name in names),
        }[where]
        weighed.clear()
        rewrite(body, {}, MESSAGES)
        assert sum(weighed) < 1.1 * most


def test_numbers_that_are_hard_to_round_take_no_longer_than_vllms_parser_does() -> None:
    """msgspec's own reading takes thirty times as long."""
    names = [name.encode() for name in middleware._FIELDS]
    part = stuffed(b"2.2250738585072011e-308", 2**16)
    body = b"{%s}" % b",".join(b'"%s":{"a":%s}' % (name, part) for name in names)

    def seconds(read: Any, *args: Any) -> float:
        began = time.thread_time()
        read(*args)
        return time.thread_time() - began

    ours = min(seconds(rewrite, body, {}, MESSAGES) for _ in range(5))
    theirs = min(seconds(json.loads, body) for _ in range(5))
    assert ours < 4 * theirs


class Spied:
    def __init__(self, decode: Any) -> None:
        self.decode = decode


@pytest.mark.parametrize("where", ["odd", "field"])
def test_a_body_of_which_a_part_is_not_read_is_counted_once_and_the_rest_is_read(
    where: str,
) -> None:
    before = unread()
    many = stuffed(b"{}", 2**19)
    body = {
        "odd": b'{"job_id":"a","x":NaN,"messages":%s}' % many,
        "field": b'{"job_id":"a","session_id":%s,"metadata":%s}' % (many, many),
    }[where]
    sent = post(CHAT, body).body
    assert newly(before) == {"in_part": 1.0}
    said = b',"kv_transfer_params":{"continuum": {"program": "a", "source": "job_id"}}}'
    assert sent == (body if where == "odd" else body[:-1] + said)


def test_the_document_says_the_bounds() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "identity.md").read_text()
    assert f"above {MAX_PARTS_BYTES >> 10} KiB" in text
    for size in (MAX_BODY_BYTES, MAX_ODD_BYTES):
        assert f"above {size >> 20} MiB" in text
    assert f"above {MAX_FIELD_BYTES >> 10} KiB" in text
    for cost in (MAX_FIELD_COST, MAX_BODY_COST):
        said = f"{cost // CONTAINER_COST:,} objects and lists ({cost:,} other values)"
        assert said in text
    assert all(f"`{why}`" in text for why in UNREAD_BODIES.values)


OWN = {"X-Run-Id": "run-17", "X-Other": "o"}


@pytest.mark.parametrize(
    ("said", "headers", "program"),
    [
        ("X-Run-Id", OWN, "x-run-id:run-17"),
        ("x-agent, X-RUN-ID", OWN, "x-run-id:run-17"),
        (["X-Other", "X-Run-Id"], OWN, "x-other:o"),
        ("X-Run-Id", {**OWN, "x-litellm-session-id": "s"}, "x-run-id:run-17"),
        ("X-Run-Id", {"X-Run-Id": " none ", "x-litellm-session-id": "s"}, "litellm:s"),
        ("", OWN, None),
    ],
)
def test_the_operators_own_headers_name_a_program_before_the_vendors(
    said: object, headers: dict[str, str], program: str | None
) -> None:
    """The config is where vLLM's API server has it; the environment counts where that is silent."""
    extra = {"id_headers": said}
    transfer = SimpleNamespace(kv_connector=CONNECTOR_NAME, kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=transfer)
    state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config))
    app = post(CHAT, b'{"model": "m"}', headers, server=SimpleNamespace(state=state))
    sent = json.loads(app.body).get("kv_transfer_params", {}).get("continuum", {})
    assert sent.get("program") == program


def test_own_headers_of_the_environment_and_none_beside_another_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ID_HEADERS, "X-Run-Id")
    assert b"x-run-id:run-17" in post(CHAT, b"{}", OWN).body
    assert own_headers({}) == ("x-run-id",)
    monkeypatch.setenv(ID_HEADERS, "no header")
    assert own_headers({}) == (), "the server itself does not start with it"
