"""The servers of the plan for a GPU, looked at where there is none.

Every `ab` of the plan is run dry as on a GPU, and vLLM's own parser reads each server's command
line.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.gpu.shape import LLAMA_8B
from bench.gpu.steps import LONG, STEPS, filled
from bench.serve import commands, package, rivals
from bench.serve.live import kv_bytes_per_token
from bench.serve.tiny_model import write_shape
from bench.tests.test_serve_arms import install

# Reads command lines from stdin, writes what is wrong with them: `vllm serve` without a server.
PARSE = """
import json, sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers()).allow_abbrev = False
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    backend = args.attention_backend
    AttentionBackendEnum[getattr(backend, "name", backend)]
    transfer = args.kv_transfer_config
    known = [*KVConnectorFactory._registry, "ContinuumConnector", None]
    assert getattr(transfer, "kv_connector", None) in known, transfer
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result folder on a machine with a GPU, LMCache beside it."""
    model = tmp_path / "llama-3.1-8b-shape"
    model.mkdir()
    write_shape(model, LLAMA_8B)
    install(tmp_path, *rivals.packages(on_cpu=False))
    monkeypatch.setattr(package, "on_cpu", lambda: False)
    return tmp_path


def shown(host: Path) -> dict[str, str]:
    """By step, what the dry run of its `ab` prints, `bench.serve.commands` and `env` left out."""
    found = {}
    for step in STEPS:
        words = filled(step.command, host, host)
        if "ab" in words:
            given = [*words[words.index("ab") :], "--dry-run"]
            done = CliRunner().invoke(commands.app, given)
            assert done.exit_code == 0, f"{shlex.join(given)}\n{done.output}"
            found[step.name] = done.output
    return found


def servers(output: str) -> list[list[str]]:
    """What would be started, variables left out."""
    lines = [part.splitlines()[-1] for part in output.split("\n# ")[1:]]
    found = [shlex.split(line) for line in lines]
    return [words[words.index("serve") :] for words in found if "serve" in words]


def test_every_arm_would_be_started_on_a_gpu(host: Path) -> None:
    for name, output in shown(host).items():
        assert servers(output), f"{name}\n{output}"
        assert "cannot run" not in output
        assert "Cpu" not in output, "no shims"


def test_an_arm_that_lacks_something_says_what(host: Path) -> None:
    (host / "lmcache-0.5.6.dist-info").rmdir()
    lacking = [name for name, output in shown(host).items() if "cannot run" in output]
    assert lacking == ["lmcache-mp"]


def test_vllm_understands_every_server(host: Path) -> None:
    pytest.importorskip("vllm")
    lines = [line for output in shown(host).values() for line in servers(output)]
    assert len(lines) >= len(LONG.arms)
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_shape_has_the_kv_of_llama_8b(host: Path) -> None:
    assert kv_bytes_per_token(host / "llama-3.1-8b-shape", "bfloat16") == 128 * 2**10
