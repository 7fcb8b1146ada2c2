"""Clients that nobody here wrote, none of them configured for us: who are they, what do they hit?

Each runs in an environment of its own (`scripts/clients`), so that none changes what vLLM brings.
Agents run as docs/agents-setup.md has them, but for the address and the model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cache import CACHE
from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import ModelShape, make_model
from continuum_connector.tools.checks.serving import family_of
from continuum_connector.tools.cli.app import app
from tests.markdown import blocks, tokens
from tests.narrow import last_words
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE, ServerFactory
from tests.server.helpers import BLOCK, eventually, read_trace, text_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOWHERE = "http://127.0.0.1:9"  # nothing listens there
SCRIPT = ("--tool-parser-plugin", str(HERE / "scripted_calls.py"), "--enable-auto-tool-choice")
SCRIPT += ("--tool-call-parser", "scripted")
# A title has no tools, so no script: it ends by its length.
SCRIPT += ("--override-generation-config", json.dumps({"temperature": 0.0, "max_new_tokens": 96}))
# An agent's first prompt takes 20,000 tokens: the tiny tokenizer spells English in letters.
LONG = ModelShape(layers=2, hidden=128, heads=2, kv_heads=1, intermediate=256, max_position=131_072)

WORDS = 64  # of an answer, in scripted_calls.py

# client -> its environment, how we know who it is
CLIENTS = {
    "openai-agents": ("sdks", "lineage"),
    "openai-agents-chat": ("sdks", "lineage"),
    "anthropic": ("sdks", "lineage"),
    "langgraph": ("sdks", "lineage"),
    "mini-swe-agent": ("mini-swe-agent", "lineage"),
}


@dataclass(frozen=True)
class Agent:
    """An agent's section in the docs. `environment`: that of scripts/clients. `config`: its file,
    below HOME. `source`, `name`: how its programs are known, and what their names begin with.
    `cached`: what its report calls the tokens that were cached."""

    environment: str
    source: str
    name: str
    cached: str
    config: str = ""


SETUP = "docs/agents-setup.md"
AGENTS = {
    "Claude Code": Agent(
        "claude-code", "vendor", "claude-code:", r'"cache_read_input_tokens":(\d+)'
    ),
    "Codex": Agent(
        "codex", "vendor", "codex:", r'"cached_input_tokens":(\d+)', ".codex/config.toml"
    ),
    "OpenCode": Agent(
        "opencode",
        "session_id",
        "session:ses_",
        r'"cache":\{"write":0,"read":(\d+)',
        ".config/opencode/opencode.json",
    ),
    "mini-swe-agent": Agent("mini-swe-agent", "lineage", "anonymous:", r'"cached_tokens": (\d+)'),
    "OpenHands": Agent("openhands", "vendor", "cache-key:", r'"cache_read_tokens":(\d+)'),
}
TURNS = 3  # scripted_calls.py
README = "It is about nothing.\n"


@pytest.fixture
def server(server_factory: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> VllmServer:
    """Ours, as an operator starts it, with a script for the calls of a model that makes none."""
    trace = tmp_path_factory.getbasetemp() / "clients.jsonl"
    return server_factory(
        "clients",
        make_model(LONG),
        num_blocks=4097,
        max_model_len=LONG.max_position,
        max_num_batched_tokens=8192,
        connector={"dram_bytes": DRAM_BYTES, "trace_path": str(trace)},
        args=MIDDLEWARE + SCRIPT,
    )


def python_of(environment: str) -> Path:
    return folder_of(environment) / "bin" / "python"


def folder_of(environment: str) -> Path:
    folder = CACHE / "clients" / environment
    if not (folder / "requirements").exists():  # written last
        pytest.skip(f"no {environment} in {folder}; scripts/clients installs it")
    return folder


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


def section(title: str) -> tuple[str, str, str]:
    """A section of the setup page: its server's line, its file of settings, its commands."""
    parts = re.split(r"^## ", (ROOT / SETUP).read_text(), flags=re.MULTILINE)
    text = next(part for part in parts if part.startswith(f"{title}\n"))
    serve, run = (block.text for block in blocks(SETUP) if block.text in text)
    files = [t.content for t in tokens(SETUP) if t.info in ("json", "toml") and t.content in text]
    return serve, "".join(files), run


def environment_of(agent: Agent, home: Path) -> dict[str, str]:
    """A user who has nothing but the agent. Nothing leaves this machine: no proxy answers."""
    folder = folder_of(agent.environment)
    bins = [folder / "bin", folder / "node_modules" / ".bin"]
    found = [str(each) for each in bins if each.exists()]
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    here = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    path = os.pathsep.join([*found, os.environ["PATH"]])
    return {"PATH": path, "HOME": str(home), "TERM": "dumb", "COLUMNS": "80", **nowhere, **here}


@pytest.mark.parametrize("title", AGENTS)
def test_an_agent_set_up_as_documented_calls_its_tool_and_hits_what_it_left(
    server: VllmServer, title: str, tmp_path: Path
) -> None:
    agent = AGENTS[title]
    home, work = tmp_path / "home", tmp_path / "work"
    env = environment_of(agent, home)
    work.mkdir()
    (work / "README.md").write_text(README)
    serve, settings, run = section(title)
    model = shlex.split(serve)[2]
    if agent.config:
        (home / agent.config).parent.mkdir(parents=True)
        (home / agent.config).write_text(_here(settings, server, model))
    else:
        home.mkdir()
    before, log = len(arrivals(server)), len(server.log.read_text())
    refusals = refused(server)
    done = subprocess.run(
        ["bash", "-euc", _here(run, server, model)],
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    written = [*work.glob("*.json"), *home.glob(".openhands/conversations/*/*.json")]
    said = done.stdout + "".join(each.read_text() for each in written)
    assert done.returncode == 0, f"{said[-3000:]}{done.stderr[-3000:]}"
    # The client says so itself: all turns but the first found most of their prompts cached.
    assert max(int(each) for each in re.findall(agent.cached, said)) > 1000
    eventually(lambda: len(arrivals(server)) >= before + TURNS)
    came = arrivals(server)[before:]
    assert len({turn["program"] for turn in came}) == 1
    assert came[0]["program"].startswith(agent.name)
    assert all(turn["source"] == agent.source for turn in came[-TURNS + 1 :])
    hits = admitted(server, came[0]["program"])[-TURNS + 1 :]
    for turn, earlier in zip(hits, came[-TURNS:], strict=False):
        assert sum(turn["hit_tokens"].values()) > 0.9 * earlier["tokens"]
    assert refused(server) == refusals
    assert "ERROR" not in server.log.read_text()[log:]


def _here(text: str, server: VllmServer, model: str) -> str:
    return text.replace("http://localhost:8000", server.url).replace(model, SERVED_NAME)


def refused(server: VllmServer) -> list[str]:
    """Requests to the model that were answered with 4xx or 5xx, as the server counts them."""
    lines = server.get("/metrics").splitlines()
    asked = [line for line in lines if re.match(r'http_requests_total\{handler="/v1/.*POST', line)]
    assert asked or not arrivals(server)  # the counter has this name
    return [line for line in asked if re.search(r'status="[45]xx"', line)]


def admitted(server: VllmServer, program: str) -> list[dict[str, Any]]:
    assert server.options.connector is not None
    records = read_trace(Path(server.options.connector["trace_path"]))
    return [r for r in records if r["event"] == "admit" and r["program"] == program]


@pytest.mark.parametrize("command", [("analyze",), ("explain", "--trace")])
def test_what_these_clients_left_in_the_trace_reads_at_80_columns(
    server: VllmServer, command: tuple[str, ...]
) -> None:
    assert server.options.connector is not None
    trace = str(server.options.connector["trace_path"])
    programs = {turn["program"] for turn in arrivals(server)}
    if len(programs) < 3:
        pytest.skip(f"{len(programs)} programs of clients here; scripts/clients installs them")
    narrow, wide = (
        CliRunner().invoke(app, [*command, trace], env={"COLUMNS": str(columns)})
        for columns in (80, 200)
    )
    assert narrow.exit_code == 0, narrow.output
    assert max(map(len, narrow.output.splitlines())) <= 80
    assert len(last_words(narrow.output)) > 10
    assert last_words(narrow.output) == last_words(wide.output), "80 columns cut something off"


@pytest.mark.parametrize("title", AGENTS)
def test_the_servers_line_is_the_one_tested_here_and_its_parsers_are_those_of_the_model(
    title: str,
) -> None:
    words = shlex.split(section(title)[0].replace("\\\n", " "))
    family = family_of(words[2])
    assert family
    given = dict(pairwise(words[3:]))
    assert given["--tool-call-parser"] == family.tools[0]
    ours = VllmServer(Path("tiny"), connector={}, args=MIDDLEWARE + SCRIPT).options
    tested = {word for word in ours.command(Path("tiny"), 0) if word.startswith("--")}
    flags = {word for word in words if word.startswith("--")}
    assert flags - {"--reasoning-parser"} <= tested
    assert {"--enable-prompt-tokens-details", *MIDDLEWARE[:1], *SCRIPT[2:4]} <= flags
