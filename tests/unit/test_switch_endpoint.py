"""SwitchEndpoint: who may switch, what is written, what each mistake is answered."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from continuum_connector import switch_endpoint
from continuum_connector.config import ADMIN_KEY, SWITCH_PATH
from continuum_connector.errors import ConfigError
from continuum_connector.switch_endpoint import SwitchEndpoint, SwitchFile

ROOT = Path(__file__).resolve().parents[2]
PATH = SwitchEndpoint.path
KEY = "s3cret-\u00e9"
Message = dict[str, Any]


@dataclass
class Answer:
    """What came back; `passed` holds what reached vLLM instead."""

    sent: list[Message] = field(default_factory=list)
    passed: list[tuple[Any, Any, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def json(self) -> dict[str, str]:
        found = json.loads(self.sent[1]["body"])
        assert self.headers["content-length"] == str(len(self.sent[1]["body"]))
        assert isinstance(found, dict)
        return found

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


def messages(*parts: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]


def call(
    method: str, queue: list[Message] | None = None, auth: str = f"Bearer {KEY}", **scope: Any
) -> Answer:
    """One request; `queue` is what the client sends, and reading beyond its end fails."""
    answer = Answer()

    async def app(*given: Any) -> None:
        answer.passed.append(given)

    async def receive() -> Message:
        assert queue, "read more than was sent"
        return queue.pop(0)

    async def send(message: Message) -> None:
        answer.sent.append(message)

    headers = [(b"Authorization", os.fsencode(auth))] if auth else []
    whole = {"type": "http", "method": method, "path": PATH, "headers": headers, **scope}
    asyncio.run(SwitchEndpoint(app)(whole, receive, send))
    if answer.passed:
        assert answer.passed == [(whole, receive, send)]
    return answer


def put(*parts: bytes, **more: Any) -> Answer:
    return call("PUT", messages(*parts), **more)


async def at(endpoint: SwitchEndpoint, method: str, body: bytes = b"") -> Answer:
    """One of several requests to the same server."""
    answer = Answer()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        answer.sent.append(message)

    headers = [(b"authorization", os.fsencode(f"Bearer {KEY}"))]
    scope = {"type": "http", "method": method, "path": PATH, "headers": headers}
    await endpoint(scope, receive, send)
    return answer


async def nobody(*_: Any) -> None:
    raise AssertionError("passed on")


async def many(endpoint: SwitchEndpoint, count: int) -> list[Answer]:
    return await asyncio.gather(*(at(endpoint, "GET") for _ in range(count)))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The switch's file, alone in its folder; both variables are set."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv(SWITCH_PATH, str(folder / "switch"))
    monkeypatch.setenv(ADMIN_KEY, KEY)
    return folder / "switch"


# --- what it is for ---------------------------------------------------------------------
def test_an_engine_does_what_was_put(path: Path) -> None:
    engine = SwitchFile(str(path), None)
    for said in ("off", "on", "off"):
        answer = put(said.encode())
        assert (answer.status, answer.json) == (200, {"switch": said})
        engine.look()
        assert engine.is_on is (said == "on")
    assert [each.name for each in path.parent.iterdir()] == ["switch"]


@pytest.mark.parametrize("parts", [[b"off"], [b" OFF \r\n"], [b"o", b"f", b"f"], [b"off", b""]])
def test_off_is_read_however_it_was_sent(path: Path, parts: list[bytes]) -> None:
    assert put(*parts).status == 200
    assert path.read_text() == "off\n"


@pytest.mark.parametrize(
    ("text", "said"), [(None, "on"), ("off\n", "off"), ("", ""), ("aus", "aus")]
)
def test_get_answers_what_the_file_says(path: Path, text: str | None, said: str) -> None:
    if text is not None:
        path.write_text(text)
    answer = call("GET")
    assert (answer.status, answer.json) == (200, {"switch": said})
    assert answer.headers["content-type"] == "application/json"


def test_below_a_root_path_it_is_the_same_path(path: Path) -> None:
    assert call("GET", path=f"/proxy{PATH}", root_path="/proxy").status == 200


# --- who may ----------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "OPTIONS"])
@pytest.mark.parametrize(
    "auth",
    [
        *("", "Bearer", "Bearer ", "Bearer x", KEY, f"Basic {KEY}"),
        *(f"Bearer {wrong}" for wrong in (f"{KEY}x", KEY[:-1], KEY.upper(), f"x {KEY}")),
    ],
)
def test_without_the_key_nothing_is_read_or_written(path: Path, method: str, auth: str) -> None:
    answer = call(method, auth=auth)  # and its body stays unread
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer KEY" in answer.json["error"]
    assert KEY not in answer.json["error"]
    assert not path.exists()


def test_the_schemes_case_does_not_matter(path: Path) -> None:
    assert call("GET", auth=f"bearer  {KEY}").status == 200


# --- mistakes ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [b"", b"of", b"0", b"on off", b'"off"', b'{"switch": "off"}', b"\xff", b"off" + b" " * 62],
)
def test_another_body_switches_nothing(path: Path, body: bytes) -> None:
    path.write_text("on\n")
    answer = put(body)
    assert answer.status == 400
    assert "neither on nor off" in answer.json["error"]
    assert path.read_text() == "on\n"


def test_a_long_body_is_not_read_to_its_end(path: Path) -> None:
    part = {"type": "http.request", "body": b"x" * 60, "more_body": True}
    assert call("PUT", [part, part]).status == 400


def test_a_client_that_leaves_amid_its_body_switches_nothing(path: Path) -> None:
    answer = call("PUT", [*messages(b"off", b"")[:1], {"type": "http.disconnect"}])
    assert not answer.sent
    assert not path.exists()


@pytest.mark.parametrize("method", ["POST", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_other_methods_are_told_which_there_are(path: Path, method: str) -> None:
    answer = call(method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, PUT"
    assert "PUT to set it" in answer.json["error"]
    assert not path.exists()


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_folder_that_is_gone_is_said(path: Path, method: str) -> None:
    path.parent.rmdir()
    answer = call(method, messages(b"off"))
    assert answer.status == 503
    verb, cost = {"PUT": ("written", "nothing was"), "GET": ("read", "nobody knows")}[method]
    assert f"{path} cannot be {verb} (" in answer.json["error"]
    assert cost in answer.json["error"]
    assert "see that its folder exists" in answer.json["error"]


def test_a_write_that_fails_leaves_nothing_behind(path: Path) -> None:
    path.mkdir()
    assert put(b"off").status == 503
    assert [each.name for each in path.parent.iterdir()] == ["switch"]


def test_a_file_that_cannot_be_read_back_was_switched_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(switch_endpoint, "read_switch", fail)
    answer = put(b"off")
    assert (answer.status, answer.json) == (200, {"switch": "off"})
    assert path.read_text() == "off\n"


def test_who_may_write_the_file_still_may(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("on\n")
    path.chmod(0o664)
    had, given = path.stat(), []
    monkeypatch.setattr(os, "chown", lambda _, *ids: given.append(ids))
    assert put(b"off").status == 200
    assert path.stat().st_mode & 0o777 == 0o664
    assert given == [(-1, had.st_gid), (had.st_uid, -1)]


def test_it_switches_where_the_rights_cannot_be_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    path.write_text("on\n")
    monkeypatch.setattr(os, "chown", fail)
    monkeypatch.setattr(os, "chmod", fail)
    assert put(b"off").status == 200
    assert path.read_text() == "off\n"


def test_a_link_stays_a_link_because_others_read_what_it_points_to(
    path: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    path.symlink_to(shared)
    assert put(b"off").status == 200
    assert path.is_symlink()
    assert shared.read_text() == "off\n"


def test_the_file_is_never_seen_half_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("on\n")
    seen = []
    replace = os.replace

    def look(source: str, target: str) -> None:
        seen.append((path.read_text(), Path(source).read_text(), Path(source).parent))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    assert put(b"off").status == 200
    assert seen == [("on\n", "off\n", path.parent)]


# --- a mount that hangs -----------------------------------------------------------------
def gets_at_a_file_that_hangs() -> None:
    """In a process of its own: a thread that Python waits for would keep it from ending."""
    switch_endpoint.TIMEOUT_S = 0.01
    for answer in asyncio.run(many(SwitchEndpoint(nobody), 40)):
        print(answer.status, answer.json["error"])


def test_a_mount_that_hangs_is_answered_and_the_server_can_end(path: Path) -> None:
    os.mkfifo(path)  # nobody ever writes it
    script = "import tests.unit.test_switch_endpoint as it; it.gets_at_a_file_that_hangs()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    first, *others = done.stdout.splitlines()
    assert first.startswith(f"503 {path} did not answer within 0.01 s, so nobody knows what it")
    assert len(others) == 39
    assert all(f"503 {path} has not answered an earlier" in line for line in others)
    assert done.stderr == ""


def test_a_write_that_hangs_may_have_switched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended = threading.Event()
    monkeypatch.setattr(switch_endpoint, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(switch_endpoint, "write_switch", lambda *_: mended.wait())

    async def ask() -> None:
        endpoint = SwitchEndpoint(nobody)
        said = (await at(endpoint, "PUT", b"off")).json["error"]
        assert "did not answer" in said
        assert "it is not known whether it was switched" in said
        later = await at(endpoint, "PUT", b"on")
        assert later.status == 503
        assert "nothing was switched" in later.json["error"]
        mended.set()
        for thread in threading.enumerate():
            if thread.name == "continuum-switch-endpoint":
                thread.join()
        monkeypatch.setattr(switch_endpoint, "TIMEOUT_S", 30)
        assert (await at(endpoint, "GET")).status == 200

    asyncio.run(ask())


def test_requests_at_once_do_not_refuse_each_other(path: Path) -> None:
    assert {answer.status for answer in asyncio.run(many(SwitchEndpoint(nobody), 40))} == {200}


# --- everything else --------------------------------------------------------------------
@pytest.mark.parametrize(
    "scope",
    [
        {"path": "/v1/completions"},
        {"path": "/"},
        {"path": f"{PATH}/"},
        {"path": f"/v1{PATH}"},
        {"type": "websocket"},
        {"type": "lifespan"},
    ],
)
def test_everything_else_passes_untouched(path: Path, scope: dict[str, str]) -> None:
    answer = put(b"off", auth="", **scope)
    assert answer.passed
    assert not answer.sent
    assert not path.exists()


# --- a server that would be open does not start -----------------------------------------
@pytest.mark.parametrize(
    ("environ", "value", "cure"),
    [
        ({}, f"{ADMIN_KEY} is empty", "set a secret"),
        ({SWITCH_PATH: "s"}, f"{ADMIN_KEY} is empty", "set a secret"),
        ({SWITCH_PATH: "s", ADMIN_KEY: " \n"}, f"{ADMIN_KEY} is empty", "set a secret"),
        ({ADMIN_KEY: "k"}, f"{SWITCH_PATH} is empty", "name the file there"),
        ({SWITCH_PATH: "", ADMIN_KEY: "k"}, f"{SWITCH_PATH} is empty", "name the file there"),
    ],
)
def test_what_is_missing_stops_the_server(
    environ: dict[str, str], value: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SWITCH_PATH, ADMIN_KEY):
        monkeypatch.delenv(name, raising=False)
        if name in environ:
            monkeypatch.setenv(name, environ[name])
    with pytest.raises(ConfigError) as error:
        SwitchEndpoint.read_key(environ)
    assert str(error.value).startswith(value)
    assert "the server stops" in str(error.value)
    assert cure in str(error.value)
    start = call("GET", type="lifespan")
    assert start.sent == [
        {"type": "lifespan.startup.failed", "message": f"ConfigError: {error.value}"}
    ]
    assert not start.passed
    for where in (PATH, "/v1/completions"):  # where nobody asks for the lifespan
        with pytest.raises(ConfigError):
            call("GET", path=where)


def test_a_key_from_a_file_may_end_in_a_newline(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, f"{KEY}\n")
    assert call("GET").status == 200


def test_a_key_may_be_any_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "k\udcff")  # as Python reads the byte ff
    assert call("GET", auth="Bearer k\udcff").status == 200
    assert call("GET", auth="Bearer k").status == 401
    assert call("GET", path="/v1/completions").passed
