"""The commands of bench/serve/gpu/README.md, tried where there is no GPU.

bash runs every block with stand-ins that write down what they were called with; every `ab` among
them is then run dry as on a GPU, and vLLM's own parser reads each server's command line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.serve import commands, package, rivals
from bench.serve.arms import DEFAULT, find_arm
from bench.serve.gpu.shape import LLAMA_8B
from bench.serve.live import kv_bytes_per_token
from bench.serve.tiny_model import write_shape
from bench.tests import ab_results
from bench.tests.test_serve_arms import install
from tests.markdown import blocks, tokens

README = "bench/serve/gpu/README.md"
STAND_INS = ("continuum", "python", "pip", "grep")
SWEEP = {"poisson:1": 54, "poisson:3": 133, "poisson:6": 255}  # programs
NOTE = "import json, sys; print(json.dumps(sys.argv[2:]), file=open(sys.argv[1], 'a'))"
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
    if backend := args.attention_backend:
        AttentionBackendEnum[getattr(backend, "name", backend)]
    transfer = args.kv_transfer_config
    known = [*KVConnectorFactory._registry, "ContinuumConnector", None]
    assert getattr(transfer, "kv_connector", None) in known, transfer
"""


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Every call of a stand-in, its name first, variables and loops resolved by bash."""
    folder = tmp_path_factory.mktemp("calls")
    for name in STAND_INS:
        note = shlex.join([sys.executable, "-c", NOTE, str(folder / "log"), name])
        (folder / name).write_text(f'#!/bin/sh\nexec {note} "$@"\n')
        (folder / name).chmod(0o755)
    script = "\n".join(block.text for block in blocks(README))
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    line = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in (folder / "log").read_text().splitlines()]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the README leaves it behind, on a machine with a GPU."""
    model = tmp_path / ".cache" / "models" / "llama-3.1-8b-shape"
    model.mkdir(parents=True)
    write_shape(model, LLAMA_8B)
    folder = tmp_path / ".cache" / "rivals"
    folder.mkdir()
    install(folder, *rivals.packages(on_cpu=False))
    monkeypatch.setattr(commands, "FOLDER", folder)
    monkeypatch.setattr(package, "on_cpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bench(words: Sequence[str]) -> str:
    """What `continuum bench WORDS` prints; it must succeed."""
    done = CliRunner().invoke(commands.app, list(words))
    assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}"
    return done.output


def abs_of(called: Sequence[Sequence[str]]) -> list[list[str]]:
    """Every `continuum bench ab`, as a dry run, without `bench`."""
    found = [list(words[2:]) for words in called if words[:3] == ["continuum", "bench", "ab"]]
    return [[each for each in words if each != "--dry-run"] + ["--dry-run"] for words in found]


def servers(shown: str) -> dict[str, list[str]]:
    """The server that a dry run shows for each arm, its variables left out."""
    found: dict[str, list[str]] = {}
    for part in shown.split("\n# ")[1:]:
        head, *lines = part.splitlines()
        words = shlex.split(lines[-1]) if lines else []
        found[head.split()[0]] = words[words.index("serve") :] if "serve" in words else []
    return found


def test_the_readme_runs_every_arm_at_the_three_loads_and_reports_them_together(
    called: list[list[str]],
) -> None:
    (line,) = (" ".join(words) for words in abs_of(called) if "--repeats" in words)
    assert "--rates 1,3,6 --dram 64GiB" in line
    assert "--out runs/jps " in line
    assert "--arms" not in line  # all there are
    assert [
        "continuum",
        "bench",
        "report",
        *(f"runs/jps/rate-{n}" for n in (1, 3, 6)),
        "-o",
        "jps.html",
    ] in called


def test_every_arm_would_be_started_on_a_gpu(called: list[list[str]], host: Path) -> None:
    for words in abs_of(called):
        shown = bench(words)
        started = servers(shown)
        assert list(started) == [find_arm(name).name for name in DEFAULT]
        assert all(started.values()), shown
        assert "cannot run" not in shown
        assert "Cpu" not in shown  # no shims
        if "--repeats" in words:
            for num_programs in SWEEP.values():
                assert f"{num_programs} programs, {8 * num_programs:,} turns" in shown
            assert shown.count("DRAM: 64 GiB for every arm") == len(SWEEP)
            assert shown.count("Runs: 50, 0 of them done") == len(SWEEP)
    assert not (host / "runs").exists()


def test_what_the_readme_shows_is_what_is_printed(called: list[list[str]], host: Path) -> None:
    (told,) = (each.content for each in tokens(README) if each.info == "text")
    assert told in bench(abs_of(called)[0])


def test_an_arm_that_lacks_something_says_what(called: list[list[str]], host: Path) -> None:
    (host / ".cache" / "rivals" / "lmcache-0.5.6.dist-info").rmdir()
    shown = bench(abs_of(called)[0])
    assert [arm for arm, words in servers(shown).items() if not words] == [
        "lmcache-mp",
        "lmcache-mp-lazy",
        "lmcache-v1",
    ]
    assert "python -m bench.serve.rivals" in shown
    assert "Runs: 7, " in shown


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_understands_every_server(called: list[list[str]], host: Path) -> None:
    lines = [line for words in abs_of(called) for line in servers(bench(words)).values()]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_report_joins_the_loads(
    called: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for jps in (1, 3, 6):
        made = ab_results.settings(f"poisson:{jps}")
        ab_results.experiment(tmp_path / f"runs/jps/rate-{jps}", (jps / 8,), 1, settings=made)
    monkeypatch.chdir(tmp_path)
    (words,) = (words[2:] for words in called if words[:3] == ["continuum", "bench", "report"])
    assert "jps.html" in bench(words)
    assert "JCT against load" in (tmp_path / "jps.html").read_text()


def test_the_shape_has_the_kv_of_llama_8b(host: Path) -> None:
    assert kv_bytes_per_token(host / ".cache/models/llama-3.1-8b-shape", "bfloat16") == 128 * 2**10
