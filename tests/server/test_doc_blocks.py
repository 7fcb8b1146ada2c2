"""The docs' commands for a running server, run as they are written: only address, file and model
are put in. A block is run if its mark names this file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.markdown import Block, blocks, documents
from tests.server.conftest import DRAM_BYTES, Stock
from tests.server.helpers import ask

BLOCKS = [
    block
    for path in documents()
    for block in blocks(path)
    if block.mark == "test" and "tests/server/test_doc_blocks.py" in block.argument
]
KEY = "the-operators-own"
# As a reader types it, but an answer of 400 and above is a failure.
STRICT = 'set -euo pipefail\ncurl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs") / "switch"


@pytest.fixture(scope="module")
def server(tiny_model: Path, stock: Stock, switch: Path) -> Iterator[VllmServer]:
    with VllmServer(
        tiny_model,
        "test-doc-blocks",
        num_blocks=stock.num_blocks,
        connector={"dram_bytes": DRAM_BYTES},
        env={"CONTINUUM_SWITCH_PATH": str(switch), "CONTINUUM_ADMIN_KEY": KEY},
        args=("--middleware", "continuum_connector.switch_endpoint.SwitchEndpoint"),
    ) as server:
        yield server


def run(
    block: Block, server: VllmServer, switch: Path, model: Path
) -> subprocess.CompletedProcess[str]:
    text = block.text
    for written, meant in (
        ("http://localhost:8000", server.url),
        ("/run/continuum/switch", str(switch)),
        ("/models/new", str(model)),
    ):
        text = text.replace(written, meant)
    return subprocess.run(
        ["bash", "-c", STRICT + text],
        env=os.environ | {"CONTINUUM_ADMIN_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_does_what_it_says(
    block: Block, server: VllmServer, switch: Path, tiny_model: Path
) -> None:
    ask(server, "chat", ["hello"])
    done = run(block, server, switch, tiny_model)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    if "continuum/switch" in block.text:
        assert switch.read_text().strip() == "on"
    if "metrics" in block.text:
        assert "continuum:turns_total" in done.stdout


def test_a_block_that_fails_is_noticed(server: VllmServer, switch: Path, tiny_model: Path) -> None:
    wrong = Block("a page", 1, "curl http://localhost:8000/no/such/path\n", "test", "", True)
    assert run(wrong, server, switch, tiny_model).returncode != 0
    wrong = Block(
        "a page", 1, "curl http://localhost:8000/metrics | grep none:such\n", "test", "", True
    )
    assert run(wrong, server, switch, tiny_model).returncode != 0


def test_there_are_blocks_to_run() -> None:
    assert {block.path for block in BLOCKS} >= {"docs/quick-start.md", "docs/switch-off.md"}
