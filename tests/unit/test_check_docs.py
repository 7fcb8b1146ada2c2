"""docs/check.md: its commands run, and its table has every line there is."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from continuum_connector.tools.cli import check as command
from continuum_connector.tools.cli.app import app
from tests.unit import fake_machine as fake

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "check.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# `continuum check ...`; the environment in a pasted command is CONTINUUM_DRAM_BYTES
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("continuum check")]
# a line that is made, or the row of the endpoints' table
MADE = re.compile(r'(?m)(?:\b(?:ok|warning|error|unseen)\(\s*|^ +\((?="\w+ endpoint"))"([\w ]+)"')
MODEL = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
MODEL |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_its_commands_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)

    def this_machine(environ: dict[str, str]) -> Any:
        return fake.make(tmp_path, environ=environ)

    monkeypatch.setattr(command, "this_machine", this_machine)
    result = CliRunner().invoke(app, words, env=dict(os.environ))
    status = 1 if "--no-enable-prefix-caching" in words else 0
    if not {"--model", "serve"} & set(words):
        status = 3  # the model's line is not seen
    assert result.exit_code == status, result.output
    assert "vLLM" in result.stdout


def test_every_line_has_its_row() -> None:
    files = (ROOT / "continuum_connector" / "tools" / "checks").glob("*.py")
    made = {name for path in files for name in MADE.findall(path.read_text())}
    rows = re.findall(r"^\| (`.*?`) \|", TEXT, re.MULTILINE)
    described = {name for cell in rows for name in re.findall(r"`(.*?)`", cell)}
    verdicts = {"ok", "warning", "error", "not seen"}
    assert made == described - verdicts


def test_the_example_has_lines_as_they_are_printed() -> None:
    shown = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert shown
    rows = shown[1].splitlines()
    verdicts = "|".join(v.value for v in command.MEANS)
    assert all(re.match(rf"({verdicts}) +\S", row) for row in rows[:-1])
    count = {v: sum(row.startswith(v) for row in rows) for v in ("error", "warning")}
    assert count == {"error": 2, "warning": 1}
    assert rows[-1].endswith("(2 errors, 1 warning).")
