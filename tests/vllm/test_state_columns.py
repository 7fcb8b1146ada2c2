"""Where vLLM's runner V2 leaves states beside drafts: its own kernels, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.vllm import compat

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton here"),
    pytest.mark.skipif(not compat.mends_drafted_states(), reason="no DRAM tier on this vLLM"),
]


@pytest.fixture(scope="module")
def played() -> dict[str, dict[str, Any]]:
    """What was read and found, by how it was played: one process, as it imports vLLM."""
    words = ["0", "1", "0miscounts"]
    command = [sys.executable, "-m", "tests.vllm.interpreted", *words]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(words, told, strict=True))


@pytest.mark.parametrize("seed", ["0", "1"], ids=["sync", "async"])
def test_each_state_that_is_read_or_found_is_right(
    played: dict[str, dict[str, Any]], seed: str
) -> None:
    found = played[seed]
    assert min(found["num_read"], found["num_found"], found["num_hit"], found["num_accepted"]) > 0
    assert found["wrong_reads"] == found["wrong_finds"] == []


def test_where_accepted_drafts_are_miscounted_no_prompts_state_is_wrong(
    played: dict[str, dict[str, Any]],
) -> None:
    """The negative control, and why answers are not kept: only they read what is wrong."""
    found = played["0miscounts"]
    assert found["wrong_finds"] == []
    assert found["wrong_reads"]
    assert all(start >= found["prompts"][turn] for turn, start in found["wrong_reads"])
