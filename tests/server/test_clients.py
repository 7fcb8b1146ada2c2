"""Clients that nobody here wrote, none of them configured for us: who are they, what do they hit?

Each runs in an environment of its own (`scripts/clients`), so that none changes what vLLM brings.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.cache import CACHE
from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE, ServerFactory
from tests.server.helpers import BLOCK, eventually, read_trace, text_of

HERE = Path(__file__).parent
SCRIPT = ("--tool-parser-plugin", str(HERE / "scripted_calls.py"), "--enable-auto-tool-choice")
SCRIPT += ("--tool-call-parser", "scripted")
SCRIPT += ("--override-generation-config", json.dumps({"temperature": 0.0}))

WORDS = 64  # of an answer, in scripted_calls.py

# client -> its environment, how we know who it is
CLIENTS = {
    "openai-agents": ("sdks", "lineage"),
    "openai-agents-chat": ("sdks", "lineage"),
    "anthropic": ("sdks", "lineage"),
    "langgraph": ("sdks", "lineage"),
    "mini-swe-agent": ("mini-swe-agent", "lineage"),
}


@pytest.fixture
def server(server_factory: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> VllmServer:
    """Ours, as an operator starts it, with a script for the calls of a model that makes none."""
    trace = tmp_path_factory.getbasetemp() / "clients.jsonl"
    connector = {"dram_bytes": DRAM_BYTES, "trace_path": str(trace)}
    return server_factory("clients", num_blocks=400, connector=connector, args=MIDDLEWARE + SCRIPT)


def python_of(environment: str) -> Path:
    python = CACHE / "clients" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no clients in {python.parents[1]}; scripts/clients installs them")
    return python


def play(server: VllmServer, client: str, environment: str) -> list[tuple[int, int]]:
    """Have the client do its work; its turns: tokens of the prompt, cached ones among them."""
    script, words = str(HERE / "client_agents.py"), text_of(400, client)
    line = [str(python_of(environment)), "-I", script, client, server.url, words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(json.loads(turn)) for turn in done.stdout.splitlines()]


def arrivals(server: VllmServer) -> list[dict[str, Any]]:
    """Every turn that came so far: its program, and how that was found."""
    assert server.options.connector is not None
    records = read_trace(Path(server.options.connector["trace_path"]))
    return [record for record in records if record["event"] in ("arrive", "return")]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_as_it_is_stays_one_program_and_hits_what_it_left(
    server: VllmServer, client: str
) -> None:
    environment, source = CLIENTS[client]
    python_of(environment)
    before = len(arrivals(server))
    turns = play(server, client, environment)
    assert len(turns) == 3
    assert turns[0][1] == 0
    for (prompt, cached), (earlier, _) in zip(turns[1:], turns, strict=False):
        # The last prompt and its answer, but for the block that they did not fill.
        assert earlier + WORDS - BLOCK < cached < prompt
    eventually(lambda: len(arrivals(server)) >= before + 3)
    came = arrivals(server)[before:]
    assert len({turn["program"] for turn in came}) == 1
    assert [turn["turn"] for turn in came] == [1, 2, 3]
    assert [turn["source"] for turn in came[1:]] == [source] * 2
