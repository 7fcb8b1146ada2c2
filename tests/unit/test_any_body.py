"""Whatever bytes are POSTed, the application sees them as they came, or one member more."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from continuum_connector.middleware import _FIELDS, MESSAGES_PATH, PATHS, ProgramMiddleware
from continuum_connector.programs.identify import as_id

ADDED = {"program", "source", "parent", "final", "tools", "compaction"}


class RefusedError(Exception):
    """Stands for fastapi's, which a server turns into an answer."""

    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code = status_code


@pytest.fixture(autouse=True, scope="module")
def fastapi() -> Any:
    stub = ModuleType("fastapi")
    stub.HTTPException = RefusedError  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fastapi", stub)
        yield


# --- bodies, as text: with members twice, numbers and characters that no library would write ----
ODD_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # halves of pairs, too
IDS = st.sampled_from(["a", "None", "job:a", "x" * 70_000, "a\ud800b", "\x00", "anonymous:1"])
NUMBERS = st.sampled_from(
    [
        "NaN",
        "-Infinity",
        "1e400",
        "-0",
        "-0.0",
        "1.10",
        "1" * 400,
        "7" * 5000,
        "18446744073709551616",
    ]
)
LEAVES = st.one_of(
    st.sampled_from(["null", "true", "false", "{}", "[]", '"ephemeral"', "01", "{,}", "'a'"]),
    NUMBERS,
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    (ODD_TEXT | IDS).flatmap(lambda s: st.booleans().map(lambda a: json.dumps(s, ensure_ascii=a))),
)
NAMES = st.sampled_from(
    [
        *_FIELDS,
        *("continuum", "agent_hint", "program", "source", "parent", "final", "keep_s", "tools"),
        *("cache_control", "type", "ttl", "content", "messages", "user_id", "trajectory_id", "x"),
    ]
).map(json.dumps) | ODD_TEXT.map(json.dumps)
SPACE = st.sampled_from(["", "", "", " ", "\r\n\t"])


def members(values: Any) -> Any:
    pair = st.tuples(SPACE, NAMES, SPACE, values).map(lambda p: f"{p[0]}{p[1]}{p[2]}:{p[3]}")
    return st.lists(pair, max_size=5).map(lambda found: f"{{{','.join(found)}}}")


VALUES = st.recursive(
    LEAVES,
    lambda inner: members(inner) | st.lists(inner, max_size=3).map(lambda v: f"[{','.join(v)}]"),
    max_leaves=12,
)
TEXTS = members(VALUES) | VALUES
ENCODINGS = st.sampled_from(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])


@st.composite
def bodies(draw: Any) -> bytes:
    text = draw(SPACE) + draw(TEXTS) + draw(SPACE)
    body: bytes = text.encode(
        draw(ENCODINGS), "surrogatepass" if draw(st.booleans()) else "replace"
    )
    if draw(st.integers(0, 5)):
        return body
    at = draw(st.integers(0, len(body)))
    return body[:at] + draw(st.sampled_from([b"", b"\x00", b"\xff", body, b"[" * 9_000]))


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *("x-session-id", "x-parent-session-id", "x-dynamo-session-final", "x-agent-hint"),
            *("x-claude-code-session-id", "thread-id", "x-codex-turn-metadata", "x-correlation-id"),
        ]
    ),
    st.sampled_from(["a", "1", "%%%", "", '{"request_kind":"compaction"}', "\xff" * 20_000, "e30"]),
    max_size=3,
)


# --- what the application sees ----------------------------------------------------------------
@dataclass
class Seen:
    """Stands for vLLM: what it got of a body, its announced length, how the messages ended."""

    body: bytes = b""
    length: int = 0
    ends: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, _send: Any) -> None:
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            self.body += message.get("body", b"")
        self.ends = [message["type"], (await receive())["type"]]
        self.length = int(dict(scope["headers"])[b"content-length"])


def send(
    body: bytes, headers: dict[str, str], path: str, size: int, goes_away: bool = False
) -> Seen | RefusedError:
    """POST the body in pieces of `size`; the client leaves after the last one, or before it."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    queue: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]
    if goes_away:
        queue.pop()

    async def receive() -> dict[str, Any]:
        return queue.pop(0) if queue else {"type": "http.disconnect"}

    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs}
    seen = Seen()
    try:
        asyncio.run(ProgramMiddleware(seen)(scope, receive, receive))  # type: ignore[arg-type]
    except RefusedError as error:
        return error
    return seen


def parse(body: bytes) -> Any:
    """As vLLM does, to whom -0 is 0; but numbers of any length, and the error if there is one."""
    try:
        return json.loads(body, parse_int=lambda digits: float(digits[:300]) + 0)
    except (ValueError, RecursionError) as error:
        return type(error)


WHOLE = b'{"job_id":"a","kv_transfer_params":{"b":1.5}}'
EXAMPLES = {
    "nested": b'{"job_id":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested in params": WHOLE[:-2] + b',"c":' + b'{"c":' * 100_000 + b"1" + b"}" * 100_002,
    "nested as deep as msgspec goes": b'{"job_id":"a","x":' + b"[" * 990 + b"]" * 990 + b"}",
    "a member twice": WHOLE[:-1] + b',"kv_transfer_params":{"c":1}}',
    "a member twice, escaped": WHOLE[:-1] + b',"kv_transfer_param\\u0073":{"c":1}}',
    "continuum twice": WHOLE[:-2] + b',"continuum":{"program":"b"},"continuum":1}}',
    "5,000 digits": b'{"job_id":"a","x":' + b"7" * 5000 + b"}",
    "5,000 digits in params": WHOLE[:-2] + b',"c":' + b"7" * 5000 + b"}}",
    "400 digits in params": WHOLE[:-2] + b',"c":' + b"7" * 400 + b"}}",
    "a float of 1,000 digits in params": WHOLE[:-2] + b',"c":0.' + b"7" * 1000 + b"}}",
    "NaN": WHOLE[:-1] + b',"x":NaN}',
    "NUL": WHOLE + b"\x00",
    "NUL in a text": b'{"job_id":"a\\u0000b"}',
    "a byte order mark": b"\xef\xbb\xbf" + WHOLE,
    "UTF-16": WHOLE.decode().encode("utf-16"),
    "half of a pair": b'{"job_id":"a","session_id":"\\ud800"}',
    "half of a pair, raw": b'{"job_id":"a","session_id":"\xed\xa0\x80"}',
    "half of a pair in an unknown field, raw": b'{"job_id":"a","x":"\xed\xa0\x80"}',
    "no UTF-8": b'{"job_id":"a","x":"\xff"}',
    "no object": b"[" + WHOLE + b"]",
    "nothing": b"",
    "white space": b" " * 1000,
    "two bodies": WHOLE + WHOLE,
}
CONTINUUMS = ["null", "1", "true", '"p"', "[]", "{}", "NaN", "[{}]", '{"program":null}', "1e400"]
EXAMPLES |= {
    f"continuum: {each}": b'{"job_id":"a","kv_transfer_params":{"continuum":%s}}' % each.encode()
    for each in CONTINUUMS
}


def check(body: bytes, headers: dict[str, str], path: str, size: int) -> None:
    found = send(body, headers, path, size)
    request = parse(body)
    if isinstance(found, RefusedError):
        assert found.status_code == 400
        assert isinstance(request, dict)
        return
    assert found.ends == ["http.request", "http.disconnect"]
    assert found.length == len(found.body)
    if found.body == body:
        return
    head = body.rstrip()[:-1].rstrip()
    assert found.body.startswith(head)
    (added,) = json.loads(b"{%s" % found.body[len(head) :].lstrip(b",")).items()
    assert added[0] == "kv_transfer_params"
    sent = parse(found.body)
    if not isinstance(request, dict):
        assert sent is request, "vLLM's own error is another one now"
        return
    params, now = request.pop(added[0], None) or {}, sent.pop(added[0])
    assert repr(sent) == repr(request)
    said, says = params.pop("continuum", None) or {}, now.pop("continuum")
    assert repr(now) == repr(params)
    silent = {
        n for n, each in said.items() if each is None or (n == "program" and as_id(each) is None)
    }
    new = {n for n in says if n not in said or (n in silent and repr(says[n]) != repr(said[n]))}
    assert repr([each for each in says.items() if each[0] not in new]) == repr(
        [each for each in said.items() if each[0] not in new]
    )
    assert new
    assert new <= ADDED


@pytest.mark.parametrize("path", [MESSAGES_PATH, "/v1/completions"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_odd_bodies_pass_or_get_one_member(name: str, path: str) -> None:
    for headers in ({}, {"x-session-id": "s"}):
        check(EXAMPLES[name], headers, path, 2**16)


@settings(max_examples=600)
@given(bodies(), HEADERS, st.sampled_from(sorted(PATHS)), st.sampled_from([7, 1000, 2**20]))
@example(b'{"job_id":"a"}', {}, MESSAGES_PATH, 1)
def test_any_body_passes_or_gets_one_member(
    body: bytes, headers: dict[str, str], path: str, size: int
) -> None:
    check(body, headers, path, size)


@settings(max_examples=100)
@given(bodies(), st.integers(1, 40))
def test_of_a_client_that_leaves_inside_its_body_all_that_came_is_seen(
    body: bytes, size: int
) -> None:
    found = send(body, {}, MESSAGES_PATH, size, goes_away=True)
    assert isinstance(found, Seen)
    whole = (len(body) - 1) // size * size  # the last piece is the one that never came
    assert found.body == (body[:whole] if body else b"")
    assert found.ends == ["http.disconnect"] * 2
