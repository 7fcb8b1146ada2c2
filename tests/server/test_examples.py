"""The agents of examples/, run as their README says: only the address is put in."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from tests.markdown import ROOT, blocks
from tests.server.helpers import eventually, reset, usage

[BLOCK] = (block for block in blocks("examples/README.md"))
AGENTS = {Path(words[1]).stem: words for words in map(shlex.split, BLOCK.text.splitlines())}
IS_FREED = {"openai_tools": False, "anthropic_messages": False, "requests_job": True}
VLLM_BLOCK = 32


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_finds_in_each_turn_what_it_left(agents: VllmServer, name: str) -> None:
    reset(agents)
    words = [word.replace("http://localhost:8000", agents.url) for word in AGENTS[name]]
    words[0] = sys.executable
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    turns = [
        (int(kept), int(prompt))
        for kept, prompt in re.findall(r"turn \d: (\d+) of (\d+) tokens were kept", done.stdout)
    ]
    assert len(turns) == 3, done.stdout
    assert turns[0][0] == 0
    for (kept, prompt), (_, before) in zip(turns[1:], turns, strict=False):
        assert before - VLLM_BLOCK < kept < prompt  # the last prompt; the tool's output is new
    if IS_FREED[name]:  # it says that it is over, so no pin stays
        eventually(lambda: usage(agents) == 0.0)


def test_there_is_no_agent_beside_these() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(IS_FREED) == set(AGENTS)
