"""What vLLM's router 0.1.17 does with programs, as docs/alternatives.md says.

The server behind it is a stand-in that reports whatever VRAM and queue the test wants.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.serve.router import HEADER
from bench.serve.server import VllmServer
from tests.server.helpers import eventually
from tests.server.router import router

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None,
    reason="vLLM's router is not installed; its wheel is for Linux on x86-64",
)

CAPACITY = 1000
TOKENS = 100  # of a prompt
HELD_S = 4.0
SAMPLES = 100


class Server(ThreadingHTTPServer):
    """A server whose metrics say what they are told to."""

    usage = waiting = 0.0
    answers_in_s = 0.0

    def __init__(self) -> None:
        self.served: list[str] = []
        self.num_reads = 0
        super().__init__(("127.0.0.1", 0), Handler)

    def be_seen(self) -> None:
        """Wait until the router, which reads metrics once a second, has what they say now: a read
        begins once the one before it is taken in."""
        enough = self.num_reads + 3
        eventually(lambda: self.num_reads >= enough)

    def metrics(self) -> str:
        self.num_reads += 1
        values = {
            "kv_cache_usage_perc": self.usage,
            "num_requests_running": 0,
            "num_requests_waiting": self.waiting,
        }
        labels = '{engine="0",model_name="tiny"}'
        return "".join(f"vllm:{name}{labels} {value}\n" for name, value in values.items())


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        models = json.dumps({"data": [{"id": "tiny"}]})
        self._answer(self.server.metrics() if self.path == "/metrics" else models)

    def do_POST(self) -> None:
        num_prompt = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
        self.server.served.append(self.headers.get(HEADER, ""))
        time.sleep(self.server.answers_in_s)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": 1}
        self._answer(json.dumps({"choices": [{"index": 0, "text": "a"}], "usage": usage}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@contextlib.contextmanager
def scheduling(server: Server, **config: Any) -> Iterator[VllmServer]:
    """The router, which has served one program and so reads the server's metrics."""
    options = ("--enable-program-scheduling", "--program-scheduling-config-json")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with router("round_robin", [url], *options, json.dumps(config)) as front:
        ask(front, "first")
        yield front


def ask(front: VllmServer, program: str, timeout_s: float = 30.0, tokens: int = TOKENS) -> Any:
    body = {"model": "tiny", "prompt": [1] * tokens, "max_tokens": 1}
    return front.post("/v1/completions", body, {HEADER: program}, timeout_s)


def is_held(front: VllmServer, program: str) -> bool:
    try:
        ask(front, program, timeout_s=HELD_S)
    except TimeoutError:
        return True
    return False


AUTO = {"program_scheduling_enable_key": "auto"}


def test_a_header_makes_a_program_only_with_the_key_auto(server: Server) -> None:
    server.usage = 1.0
    with scheduling(server, token_capacity_per_dp_rank=CAPACITY) as front:
        assert not is_held(front, "a")
        assert not server.num_reads, "it knows of no program, so it asks no server"


def test_with_a_capacity_vram_in_use_holds_programs_back_though_nothing_runs(
    server: Server,
) -> None:
    with scheduling(server, **AUTO, token_capacity_per_dp_rank=CAPACITY) as front:
        server.usage = 0.95  # as our pins are shown
        server.be_seen()
        assert is_held(front, "a")
        server.usage = 0.0
        server.be_seen()
        assert not is_held(front, "b")


def test_without_a_capacity_only_a_queue_in_vllm_does(server: Server) -> None:
    server.usage = 1.0
    with scheduling(server, **AUTO) as front:
        server.be_seen()
        assert not is_held(front, "a")
        server.waiting = 1
        server.be_seen()
        assert is_held(front, "b")


def test_the_bound_on_a_wait_counts_only_while_vllm_has_no_queue(server: Server) -> None:
    bounded = {**AUTO, "force_resume_timeout_seconds": 1.0}
    with scheduling(server, **bounded, token_capacity_per_dp_rank=CAPACITY) as front:
        server.usage, server.waiting = 1.0, 0
        server.be_seen()
        assert not is_held(front, "full")
        server.waiting = 1
        server.be_seen()
        assert is_held(front, "queued")


def test_the_program_that_was_served_last_goes_first_and_a_new_one_last(server: Server) -> None:
    with (
        scheduling(server, **AUTO, max_active_programs_per_target=1) as front,
        ThreadPoolExecutor() as clients,
    ):
        for program in "abc":
            ask(front, program)
        server.served.clear()
        server.answers_in_s = 2.0
        asked: list[Future[Any]] = []
        for number, program in enumerate(["one", "new", "a", "b", "c"]):
            asked.append(clients.submit(ask, front, program))
            if not number:
                eventually(lambda: bool(server.served))
            time.sleep(0.1)
        for each in asked:
            each.result()
    assert server.served == ["one", "c", "b", "a", "new"]


def test_its_ttl_is_0_until_100_programs_have_come_back(server: Server) -> None:
    with scheduling(server, **AUTO, token_capacity_per_dp_rank=10**6) as front:
        for _ in range(SAMPLES + 10):
            ask(front, "a", tokens=5000)  # dear enough to be waited for
        log = front.log.read_text(errors="replace")
    paused = re.findall(r"program_pause.*ttl_expired", log)
    assert len(paused) == pytest.approx(SAMPLES, abs=2)
