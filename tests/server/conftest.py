"""Real servers for tests: one per name and module, stopped when the module is done.

    def test_x(server_factory):
        server = server_factory("pins", num_blocks=100, connector={"ttl_s": 5})
        server.post("/v1/completions", {...})

The same name in the same module gives the running server back; other options under a name
already taken are refused. Options are those of `bench.serve.server.ServerOptions`, and `model`
(a folder; the tiny Llama when left out). A failed test's report ends with the server's log.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import ServerError, VllmServer, free_port
from bench.serve.tiny_model import GPT_OSS, HYBRID, LLAMA, make_model
from tests.server.helpers import PROGRAMS, log_of, play

HERE = Path(__file__).parent
MIDDLEWARE = ("--middleware", "continuum_connector.middleware.ProgramMiddleware")
# A model of random weights calls no tools: a script does, where a request has some.
TOOLS = ("--tool-parser-plugin", str(HERE / "scripted_calls.py"), "--enable-auto-tool-choice")
TOOLS += ("--tool-call-parser", "scripted")
# An odd size: the pool is the only mapping of its length in the worker.
DRAM_BYTES = 397 * 32 * LLAMA.kv_bytes_per_token()
NUM_BLOCKS = 129


@dataclass(frozen=True)
class Stock:
    """What a server without our flag answered `helpers.PROGRAMS`, and what it said."""

    num_blocks: int
    answers: list[list[list[int]]]
    metrics: str
    log: str


class ServerFactory:
    """Servers by name. Two cores bear one busy server, so stop one before you need the next."""

    def __init__(self, default_model: Path) -> None:
        self._model = default_model
        self._servers: dict[str, tuple[VllmServer, dict[str, Any]]] = {}
        self._broken: dict[str, ServerError] = {}

    def __call__(self, name: str, model: Path | None = None, **options: Any) -> VllmServer:
        """Give back the running server of this name, or start it."""
        if name in self._broken:  # a start takes half a minute: fail once, not per test
            raise self._broken[name]
        wanted = {"model": model or self._model, **options}
        if name in self._servers:
            server, have = self._servers[name]
            assert have == wanted, f"server {name!r} already runs with other options: {have}"
            if server.alive():
                return server
        server = VllmServer(wanted["model"], f"test-{name}", **options)
        try:
            server.start()
        except ServerError as error:
            self._broken[name] = error
            raise
        self._servers[name] = (server, wanted)
        return server

    def stop(self, name: str | None = None) -> None:
        """Stop one server, or all of them."""
        for each in [name] if name else list(self._servers):
            self._servers.pop(each)[0].stop()

    def logs(self) -> list[tuple[Path, str]]:
        """Log file and last lines of every server started here."""
        return [(server.log, server.log_tail(40)) for server, _ in self._servers.values()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test in this folder, with the reason, without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; run `make setup`"))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny random Llama."""
    return make_model()


@pytest.fixture(scope="session")
def hybrid_model() -> Path:
    """Folder of the tiny Gemma-3-like model: sliding windows and full attention."""
    return make_model(HYBRID)


@pytest.fixture(scope="session")
def gpt_oss_model() -> Path:
    """Folder of the tiny gpt-oss-like model: windows in every other layer, sinks, experts."""
    return make_model(GPT_OSS)


@pytest.fixture(scope="module")
def server_factory(tiny_model: Path) -> Iterator[ServerFactory]:
    """Start (or give back) the server of a name; all are stopped after the module."""
    factory = ServerFactory(tiny_model)
    try:
        yield factory
    finally:
        factory.stop()


@pytest.fixture(scope="session")
def stock(tiny_model: Path) -> Stock:
    """A stock server with as much VRAM as `agents`; it has answered and is gone."""
    with VllmServer(tiny_model, "test-stock", num_blocks=NUM_BLOCKS) as server:
        answers = play(server, PROGRAMS)
        return Stock(NUM_BLOCKS, answers, server.get("/metrics"), log_of(server))


@pytest.fixture(scope="session")
def events_port() -> int:
    """Where `agents` publishes its KV events."""
    return free_port()


@pytest.fixture(scope="session")
def agents(
    tiny_model: Path, events_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """One server with everything on, shared by the modules that need no other.

    Its TTL is long, so that no pin expires because the machine is slow; tests that want a
    short one send `ttl_s`. A test begins with `helpers.reset` where others' pins matter.
    """
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    events["endpoint"] = f"tcp://*:{events_port}"  # vLLM binds only to a wildcard
    trace = tmp_path_factory.mktemp("agents") / "trace.jsonl"
    with VllmServer(
        tiny_model,
        "test-agents",
        num_blocks=NUM_BLOCKS,
        connector={
            "policy": "fixed_ttl",
            "ttl_s": 50,
            "dram_bytes": DRAM_BYTES,
            "trace_path": str(trace),
        },
        env={"CONTINUUM_CHECKSUM_EVERY": "0"},  # a test overwrites DRAM, and must be believed
        args=(*MIDDLEWARE, *TOOLS, "--kv-events-config", json.dumps(events)),
    ) as server:
        yield server


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the tail of each server's log to the report of a failed test."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        factory = getattr(item, "funcargs", {}).get("server_factory")
        logs = factory.logs() if factory else []
        shared = getattr(item, "funcargs", {}).get("agents")
        if shared is not None:
            logs.append((shared.log, shared.log_tail(40)))
        for path, tail in logs:
            report.sections.append((f"server log {path}", tail))
