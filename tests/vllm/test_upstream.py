"""The scripts of docs/upstream.md, which show faults of vLLM's own: what they say of this vLLM."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import vllm

SCRIPTS = Path(__file__).parents[2] / "docs" / "upstream"
ASKED = ("0.26.0", "0.27.1", "0.29.0", "0.30.0", "0.32.0", "0.33.0")
THERE = {  # the releases of these that have the fault
    "python docs/upstream/same_step_preemption.py": ASKED,
    "python docs/upstream/lost_session.py": ("0.27.1", "0.29.0", "0.30.0", "0.32.0"),
}


@pytest.mark.parametrize("command", THERE)
def test_the_line_and_the_exit_code_tell_whether_this_vllm_has_the_fault(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = runpy.run_path(str(SCRIPTS / Path(command).name))["main"]()
    said = capsys.readouterr().out.strip().splitlines()[-1]
    word = {0: "mended", 1: "the fault is there"}[code]
    assert f"vLLM {vllm.__version__}: {word}" in said
    if vllm.__version__ in ASKED:
        assert (code == 1) == (vllm.__version__ in THERE[command]), said


@pytest.mark.parametrize("command", THERE)
def test_the_script_runs_without_anything_of_ours(command: str) -> None:
    tree = ast.parse((SCRIPTS / Path(command).name).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any(getattr(node, "level", 0) for node in nodes)
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    allowed = {"collections", "dataclasses", "json", "pathlib", "sys", "tempfile", "torch", "vllm"}
    assert {name.partition(".")[0] for name in names} <= allowed
