"""The docs' commands for a running server, run as they are written: only address, file, model and
program are put in. A block is run if its mark names this file, in a folder with the quick start's
agent. What that agent finds of its prompts is compared with a stock server's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.markdown import Block, blocks, documents, tokens
from tests.server.conftest import DRAM_BYTES
from tests.server.helpers import ask, text_of

BLOCKS = [
    block
    for path in documents()
    for block in blocks(path)
    if block.mark == "test" and "tests/server/test_doc_blocks.py" in block.argument
]
KEY, PROGRAM = "the-operators-own", "somebody"
ROOM = 192  # blocks: as many tokens as the quick start's server has, which are less than it needs
HERE = Path(sys.executable).parent
# As a reader types it, but an answer of 400 and above is a failure.
STRICT = 'set -euo pipefail\ncurl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def switch(folder: Path) -> Path:
    return folder / "switch"


def write_agent(folder: Path, server: VllmServer) -> None:
    """The quick start's agent.py, for this server."""
    (agent,) = (one for one in tokens("docs/quick-start.md") if one.info == "python")
    (folder / "agent.py").write_text(agent.content.replace("http://localhost:8000", server.url))


def kept_by_turn(said: str) -> list[int]:
    """Tokens of its prompt that were kept for each turn, as the agent says."""
    kept = re.findall(r"^turn \d: ([\d,]+) of [\d,]+ tokens were kept$", said, re.MULTILINE)
    return [int(each.replace(",", "")) for each in kept]


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path, switch: Path) -> Iterator[VllmServer]:
    with VllmServer(
        tiny_model,
        "test-doc-blocks",
        num_blocks=ROOM,
        connector={"dram_bytes": DRAM_BYTES},
        env={
            "CONTINUUM_SWITCH_PATH": str(switch),
            "CONTINUUM_ADMIN_KEY": KEY,
            "CONTINUUM_TRACE_PATH": str(folder / "trace.jsonl"),
        },
        args=("--middleware", "continuum_connector.switch_endpoint.SwitchEndpoint"),
    ) as server:
        write_agent(folder, server)
        yield server


def run(
    block: Block, server: VllmServer, switch: Path, model: Path
) -> subprocess.CompletedProcess[str]:
    text = block.text
    for written, meant in (
        ("http://localhost:8000", server.url),
        ("http://SERVER:8000", server.url),
        (" TRACE", f" {switch.parent}/trace.jsonl"),
        (" PROGRAM", f" {PROGRAM}"),
        ("/run/continuum/switch", str(switch)),
        ("/models/new", str(model)),
    ):
        text = text.replace(written, meant)
    return subprocess.run(
        ["bash", "-c", STRICT + text],
        cwd=switch.parent,
        env=os.environ | {"CONTINUUM_ADMIN_KEY": KEY, "PATH": f"{HERE}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_does_what_it_says(
    block: Block, server: VllmServer, switch: Path, tiny_model: Path
) -> None:
    ask(server, "chat", [text_of(100, "hello")], vllm_xargs={"job_id": PROGRAM})
    done = run(block, server, switch, tiny_model)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    if "continuum/switch" in block.text:
        assert switch.read_text().strip() == "on"
    if "metrics" in block.text:
        assert "continuum:turns_total" in done.stdout
    if "continuum explain" in block.text:
        of_this_page = (
            f"job:{PROGRAM}  " if " PROGRAM" in block.text else "session:agent-1  named by "
        )
        assert of_this_page in done.stdout
        assert "worth to all programs" in done.stdout
    if "agent.py" in block.text:
        first, *others = kept_by_turn(done.stdout)
        assert first == 0
        assert len(others) == 2
        assert min(others) > 3_000, "its prompt was kept while others took its room in VRAM"
    if "continuum analyze" in block.text:
        assert "hit ratio, VRAM" in done.stdout
    if "continuum top" in block.text:
        assert done.stdout.startswith(f"continuum top  {server.url}  tiny  on")


def test_stock_loses_what_the_quick_start_keeps(tiny_model: Path, tmp_path: Path) -> None:
    with VllmServer(tiny_model, "test-quick-start", num_blocks=ROOM) as stock:
        write_agent(tmp_path, stock)
        line = [sys.executable, "agent.py"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert kept_by_turn(done.stdout) == [0, 0, 0]


def test_a_block_that_fails_is_noticed(server: VllmServer, switch: Path, tiny_model: Path) -> None:
    wrong = Block("a page", 1, "curl http://localhost:8000/no/such/path\n", "test", "", True)
    assert run(wrong, server, switch, tiny_model).returncode != 0
    wrong = Block(
        "a page", 1, "curl http://localhost:8000/metrics | grep none:such\n", "test", "", True
    )
    assert run(wrong, server, switch, tiny_model).returncode != 0


def test_there_are_blocks_to_run() -> None:
    pages = {"docs/quick-start.md", "docs/runbook.md", "docs/switch-off.md"}
    assert {block.path for block in BLOCKS} >= pages
