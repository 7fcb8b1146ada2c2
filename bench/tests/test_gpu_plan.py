"""The plan for a GPU, from end to end on a CPU: simulated driver, real servers, as one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.runner import FILE, read_state
from bench.gpu.steps import STEPS

LIMIT_S = 1800.0


@pytest.mark.release  # ten minutes of real servers, as in tests/server
def test_every_step_that_a_cpu_can_rehearse_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    out = tmp_path / "gpu"
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    state = read_state(out / FILE)
    told = {each.name: (state.of(each).verdict, state.of(each).said) for each in STEPS}
    needs_gpu = {each.name for each in STEPS if not isinstance(each.rehearsal, tuple)}
    assert needs_gpu == {"machine", "evenness"}
    wrong = {name: told[name] for name in told.keys() - needs_gpu if told[name][0] != "proven"}
    assert not wrong, ended.stdout
    assert all(told[name][0] == "not reached" for name in needs_gpu)
    assert ended.returncode == 0, ended.stdout + ended.stderr
