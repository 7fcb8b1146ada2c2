"""What vLLM's router hashes, as docs/beyond-one-machine.md says: on every API, the header only."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.serve.server import VllmServer
from tests.server.helpers import APIS, text_of
from tests.server.router import BINDING, router

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None,
    reason="vLLM's router is not installed; its wheel is for Linux on x86-64",
)

NUM_PROGRAMS, NUM_TURNS = 12, 4
AGENTS = {"Claude Code": "x-claude-code-session-id", "Codex": "session-id"}
PARAMS = {"continuum": {"final": False}}


class Echo(BaseHTTPRequestHandler):
    """A replica that answers with who it is and what came to it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        port = self.server.server_address[1]
        self._answer({"port": port, "body": body, "headers": {**self.headers}})

    def _answer(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Two of them."""
    echoes = [ThreadingHTTPServer(("127.0.0.1", 0), Echo) for _ in range(2)]
    for echo in echoes:
        threading.Thread(target=echo.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{echo.server_address[1]}" for echo in echoes]
    for echo in echoes:
        echo.shutdown()
        echo.server_close()


@pytest.fixture(scope="module")
def binding(urls: list[str]) -> Iterator[VllmServer]:
    """With program scheduling for what it alone is good for here: it binds, and holds nobody."""
    with router("round_robin", urls, *BINDING) as running:
        yield running


@pytest.fixture(scope="module")
def front(urls: list[str]) -> Iterator[VllmServer]:
    with router("consistent_hash", urls) as running:
        yield running


def replicas_of(front: VllmServer, api: str, where: str) -> list[set[int]]:
    """Which replicas each program met, with its id in a header or in a field of the body."""
    met: list[set[int]] = [set() for _ in range(NUM_PROGRAMS)]
    for i in range(NUM_PROGRAMS):
        history = [text_of(30, f"{api} {where} {i}")]
        for turn in range(NUM_TURNS):
            named = {where: f"run-{i}"}
            in_header = where.startswith("X-")
            body = {"model": "tiny", **APIS[api].body(history, 4), **({} if in_header else named)}
            answer = front.post(APIS[api].path, body, named if in_header else None)
            met[i].add(answer["port"])
            history += ["answer", text_of(10, f"{i} {turn}")]
    return met


@pytest.mark.parametrize("api", APIS)
def test_the_header_brings_a_program_back_and_spreads_programs(front: VllmServer, api: str) -> None:
    met = replicas_of(front, api, "X-Session-ID")
    assert {len(ports) for ports in met} == {1}
    assert len(set.union(*met)) == 2


@pytest.mark.parametrize("where", ["session_id", "job_id"])
def test_in_the_body_an_id_does_not_do_the_same(front: VllmServer, where: str) -> None:
    completions = replicas_of(front, "completions", where)
    assert any(len(ports) == 2 for ports in completions), "turns of one program are scattered"
    chat = replicas_of(front, "chat", where)
    assert len(set.union(*chat)) == 1, "all programs meet one replica"


def test_what_we_read_passes_the_router(front: VllmServer) -> None:
    body = {"model": "tiny", **APIS["chat"].body(["x"], 4), "kv_transfer_params": PARAMS}
    body |= {"job_id": "a", "vllm_xargs": {"job_id": "b"}, "session_id": "c"}
    headers = {"X-Session-ID": "d", "x-claude-code-session-id": "e"}
    came = front.post("/v1/chat/completions", body, headers)
    assert body.items() <= came["body"].items()
    lower = {name.lower(): value for name, value in came["headers"].items()}
    assert {"x-session-id": "d", "x-claude-code-session-id": "e"}.items() <= lower.items()


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_bound_by_its_own_header_an_agent_stays_with_one_replica(
    binding: VllmServer, api: str, agent: str
) -> None:
    ports = [turns_of(binding, api, AGENTS[agent], f"{agent}-{i}") for i in range(NUM_PROGRAMS)]
    assert {len(each) for each in ports} == {1}
    assert len(set.union(*ports)) == 2


def test_without_such_a_header_turns_are_scattered(binding: VllmServer) -> None:
    ports = [turns_of(binding, "chat", "x-nobodys-session", str(i)) for i in range(NUM_PROGRAMS)]
    assert any(len(each) == 2 for each in ports)


def turns_of(front: VllmServer, api: str, header: str, program: str) -> set[int]:
    """Which replicas the turns of a program meet, whose id is in this header."""
    history, met = [text_of(30, f"{api} {program}")], set()
    for turn in range(NUM_TURNS):
        body = {"model": "tiny", **APIS[api].body(history, 4)}
        met.add(front.post(APIS[api].path, body, {header: program})["port"])
        history += ["answer", text_of(10, f"{program} {turn}")]
    return met
