"""The plan for a GPU, from end to end on a CPU: simulated driver, real servers, as one command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu.runner import FILE, read_state
from bench.gpu.steps import STEPS, Step

LIMIT_S = 1800.0  # ten minutes on two quiet cores
# The same command as `gather` and `drafts`, a minute or two each; tests/server asks as much of CI.
ALIKE = ("sleep", "hybrid", "equal", "overwrite")


def test_what_needs_a_gpu_and_what_waits_for_a_release_is_known() -> None:
    needs_gpu = {step.name for step in STEPS if isinstance(step.rehearsal, str)}
    assert needs_gpu == {"machine", "evenness"}
    assert set(ALIKE) < {step.name for step in STEPS} - needs_gpu


def test_every_step_that_a_cpu_can_rehearse_is_rehearsed(tmp_path: Path) -> None:
    _rehearse([step for step in STEPS if step.name not in ALIKE], tmp_path / "gpu")


@pytest.mark.release
def test_every_other_comparison_of_answers_is_rehearsed(tmp_path: Path) -> None:
    _rehearse([step for step in STEPS if step.name in ALIKE], tmp_path / "gpu")


def _rehearse(steps: Sequence[Step], out: Path) -> None:
    pytest.importorskip("vllm")
    names = ",".join(step.name for step in steps)
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--only", names, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    state = read_state(out / FILE)
    told = {step.name: (state.of(step).verdict, state.of(step).said) for step in steps}
    needs_gpu = {step.name for step in steps if isinstance(step.rehearsal, str)}
    wrong = {name: told[name] for name in told.keys() - needs_gpu if told[name][0] != "proven"}
    assert not wrong, ended.stdout
    assert all(told[name][0] == "not reached" for name in needs_gpu)
    assert ended.returncode == 0, ended.stdout + ended.stderr
