"""EpochEndpoint: who may begin an epoch, what is asked of the engine, how mistakes are answered."""

from __future__ import annotations

import asyncio

import pytest

from continuum_connector.config import ADMIN_KEY
from continuum_connector.epoch_endpoint import EpochEndpoint
from tests.unit import endpoint_calls
from tests.unit.endpoint_calls import Called, Message

KEY = "s3cret"


def call(
    body: bytes = b"",
    method: str = "PUT",
    key: str = KEY,
    path: str = EpochEndpoint.path,
    failure: Exception | None = None,
    has_engine: bool = True,
) -> Called:
    return endpoint_calls.call(
        EpochEndpoint,
        lambda *how: how[0] is True,
        method=method,
        path=path,
        key=key,
        body=body,
        failure=failure,
        has_engine=has_engine,
    )


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)


def test_without_a_body_the_engine_resets_its_cache_and_the_connectors() -> None:
    called = call()
    assert called.asked == [(False, True)]
    assert (called.status, called.json) == (200, {"name": "", "vram_emptied": False})


def test_a_name_goes_in_the_place_of_the_flag() -> None:
    called = call(b'{"name": "policy-120", "reset_running_requests": true}')
    assert called.asked == [(True, "policy-120")]
    assert called.json == {"name": "policy-120", "vram_emptied": True}


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'{"nam": "x"}', b'{"name": 5}', b'{"reset_running_requests": 1}'),
        *(b" " * 9999, b"[" * 4000, b'{"name": "\\ud800"}'),
    ],
    ids=lambda body: ascii(body[:20]),
)
def test_a_body_that_says_something_else_begins_nothing(body: bytes) -> None:
    called = call(body if body.strip() else b'{"name": "' + b"x" * 9999 + b'"}')
    assert called.status == 400
    assert "no epoch began" in called.json["error"]
    assert not called.asked


def test_who_has_not_the_key_begins_nothing() -> None:
    called = call(key="guess")
    assert called.status == 401
    assert not called.asked


def test_to_read_it_is_not_served() -> None:
    assert call(method="GET").status == 405


def test_a_reset_that_fails_is_told_with_what_to_do() -> None:
    called = call(failure=RuntimeError("EngineCore is gone"))
    assert called.status == 503
    assert "RuntimeError: EngineCore is gone" in called.json["error"]
    assert "send it again" in called.json["error"]


def test_without_an_engine_it_says_so() -> None:
    called = call(has_engine=False)
    assert called.status == 503
    assert "no engine is behind this server" in called.json["error"]


def test_other_paths_pass() -> None:
    called = call(path="/v1/models")
    assert (called.passed, called.sent) == (1, [])


def test_without_a_key_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(EpochEndpoint(lambda *_: None)({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert sent[0]["type"] == "lifespan.startup.failed"
    told = sent[0]["message"]
    assert all(word in told for word in (EpochEndpoint.path, "CONTINUUM_ADMIN_KEY", "--middleware"))
