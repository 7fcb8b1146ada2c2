"""`continuum check` as it is typed: output, JSON, exit codes, and a Python without vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner, Result

from continuum_connector.tools.checks import error, ok, unseen, warning
from continuum_connector.tools.checks import machine as machines
from continuum_connector.tools.cli import check as command
from continuum_connector.tools.cli.app import app
from tests.unit import fake_machine as fake

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Make this a machine where all is well; the environments it was asked with."""
    environs: list[dict[str, str]] = []

    def this_machine(environ: dict[str, str]) -> Any:
        environs.append(environ)
        return fake.make(tmp_path / str(len(environs)), environ=environ)

    monkeypatch.setattr(command, "this_machine", this_machine)
    return environs


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(
        json.dumps(sizes | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return str(tmp_path)


FLAG = ["--kv-transfer-config", '{"kv_connector":"ContinuumConnector"}']


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["check", *words])


@pytest.mark.usefixtures("here")
def test_a_pipe_gets_one_line_each() -> None:
    result = run("--", "vllm", "serve", "--no-enable-prefix-caching", *FLAG)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "ok       vLLM            0.32.0, within what is tested, 0.26.0 to 0.33.0"
    assert lines[3].endswith("never be found again -> serve with --enable-prefix-caching")
    assert " ".join(lines[-2:]) == (
        "ContinuumConnector will not do here what was asked of it (1 error, 2 warnings, 1 "
        "not seen)."
    )


@pytest.mark.usefixtures("here")
def test_warnings_are_no_failure(model: str) -> None:
    result = run("--", "vllm", "serve", model, *FLAG)
    assert result.exit_code == 0
    assert "could work better (2 warnings)" in result.stdout


@pytest.mark.usefixtures("here")
def test_what_is_not_seen_is_not_ok_unless_it_was_accepted() -> None:
    result = run()
    assert result.exit_code == 3
    assert result.stdout.endswith(
        "Whether ContinuumConnector works here is not known (1 not seen): look at model.\n"
    )
    assert json.loads(run("--json").stdout)["verdict"] == "not seen"
    assert run("--accept", "PCIe link").exit_code == 3
    accepted = run("--accept", "PCIe link", "--accept", "model")
    assert accepted.exit_code == 0
    assert "not seen, which was accepted: none was named" in accepted.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["vllm", "serve", "{}"], 0),
        (["nohup", "/opt/vllm/bin/vllm", "serve", "{}", "--port", "80"], 0),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "{}"], 0),
        (["python", "-m", "vllm.entrypoints.cli.main", "serve", "{}"], 0),
        (["vllm serve {} --port 80"], 0),
        (["vllm", "bench", "serve", "--model", "{}"], 1),
        (["vllm", "chat", "--model", "{}"], 1),
        (["python", "-m", "vllm.entrypoints.cli.main", "chat", "--model", "{}"], 1),
        (["sleep", "1", "--model", "{}"], 1),
        (["serve", "--model", "{}"], 1),
        (["A=b"], 1),
        (["vllm serve 'x"], 1),
        (["vllm", "serve", "{}", "-tp", "9" * 5000], 2),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_pasted_command_that_does_not_start_vllms_server_is_an_error(
    model: str, words: list[str], status: int
) -> None:
    result = run("--", *(word.format(model) for word in words))
    assert result.exit_code == status, result.output
    assert ("error    command" in result.stdout) == (status == 1)
    assert len(result.stderr.splitlines()) == (status == 2)


@pytest.mark.usefixtures("here")
def test_a_verdict_outlives_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "show", gone)
    assert run("--", "--no-enable-prefix-caching").exit_code == 1


@pytest.mark.usefixtures("here")
def test_json() -> None:
    result = run("--json", "--", "--tensor-parallel-size", "2")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"]) == (1, "error")
    assert found["lines"][0] == {
        "subject": "vLLM",
        "verdict": "ok",
        "text": "0.32.0, within what is tested, 0.26.0 to 0.33.0",
        "cure": "",
    }


@pytest.mark.parametrize("as_one_word", [False, True])
def test_a_pasted_command_with_its_environment(
    here: list[dict[str, str]], as_one_word: bool
) -> None:
    pasted = ["CONTINUUM_DRAM_BYTES=2GiB", "vllm", "serve", "nobody/none", "--port", "80"]
    result = run("--", *([" ".join(pasted)] if as_one_word else pasted))
    assert "a DRAM tier of 2.0 GiB" in result.stdout
    assert "nobody/none is no folder" in result.stdout
    assert here[0]["CONTINUUM_DRAM_BYTES"] == "2GiB"
    assert here[0]["PATH"] == os.environ["PATH"]


@pytest.mark.usefixtures("here")
def test_a_file_or_standard_input_is_read(model: str, tmp_path: Path) -> None:
    text = f"# ours\nvllm serve {model} \\\n  --port $PORT\n"
    (tmp_path / "serve.sh").write_text(text)
    by_file = run(str(tmp_path / "serve.sh"))
    by_input = CliRunner().invoke(app, ["check", "-"], input=text)
    for result in (by_file, by_input):
        assert result.exit_code == 3
        assert "is served" in result.stdout
        assert "$PORT: only who runs it knows" in result.stdout
    assert "starts no server" in run(str(tmp_path / "config.json")).stdout


@pytest.mark.usefixtures("here")
def test_options_behind_a_pasted_command_are_its_own(model: str) -> None:
    words = ["docker", "run", "-p", "1:1", "vllm/vllm-openai", "--model", model, "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("ok ")


@pytest.mark.usefixtures("here")
def test_a_role_that_vllm_does_not_know_is_an_error(model: str) -> None:
    transfer = '{"kv_connector":"ContinuumConnector","kv_role":"kv_bth"}'
    result = run("--", "--model", model, "--kv-transfer-config", transfer)
    assert result.exit_code == 1
    assert "kv_role = 'kv_bth' stops the server" in result.stdout


@pytest.mark.parametrize(("said", "status"), [("refused", 1), ("unread", 3)])
def test_vllms_own_parser_is_asked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(module: str, *words: str) -> dict[str, Any]:
        asked.extend([words] if module == "vllm" else [])
        return healthy.ask(module) | ({said: "-tp2"} if module == "vllm" else {})

    healthy = fake.make(tmp_path / "root")
    monkeypatch.setattr(command, "this_machine", lambda environ: replace(healthy, ask=ask))
    result = run("--", "A=b", "vllm", "serve", model, "-tp2")
    assert result.exit_code == status
    assert "options" in result.stdout
    assert "-tp2" in result.stdout
    assert asked == [(model, "-tp2")]


def test_a_model_behind_options_is_found_by_vllms_parser(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(module: str, *words: str) -> dict[str, Any]:
        return healthy.ask(module) | ({"model": words[-1]} if module == "vllm" else {})

    healthy = fake.make(tmp_path / "root")
    monkeypatch.setattr(command, "this_machine", lambda environ: replace(healthy, ask=ask))
    result = run("--", "vllm", "serve", "--port", "8000", model)
    assert "none was named" not in result.stdout
    assert "is served" in result.stdout


@pytest.mark.usefixtures("here")
def test_a_pasted_command_without_the_flag_serves_as_stock(model: str) -> None:
    said = "as it stands it serves as stock"
    assert said in run("--", "vllm", "serve", model).stdout
    assert said not in run("--model", model).stdout
    assert said not in run("--", "vllm", "serve", model, *FLAG).stdout


def test_options_beside_a_pasted_command_win() -> None:
    result = run("--model", "given", "--", "vllm", "serve", "pasted")
    assert "given is no folder" in result.stdout


@pytest.mark.parametrize(
    "words", [["--tensor-parallel-size", "0"], ["--", "vllm", "serve", "-tp", "x"]]
)
def test_usage_errors_have_status_2(words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_a_terminal_gets_a_table_with_the_cure_below() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    command.show(
        console, [ok("a", "fine [sic]"), warning("b", "slow", "do x"), unseen("c", "dark")]
    )
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == [
        "ok        a  fine [sic]",
        "warning   b  slow",
        "             do x",
        "not seen  c  dark",
        "",
        "Whether ContinuumConnector works here is not known (1",
        "warning, 1 not seen): look at c.",
    ]


def test_the_last_line_counts() -> None:
    assert command.verdict([ok("a", "x")]) == "Nothing in the way of ContinuumConnector."
    lines = [error("a", "x", "y"), error("b", "x", "y"), warning("c", "x", "y")]
    assert command.verdict(lines).endswith("(2 errors, 1 warning).")


# --- this machine -------------------------------------------------------------------------
def test_a_process_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machines.this_machine(os.environ)
    assert machine.ask("nothing_we_know")["trouble"] == "KeyError: 'nothing_we_know'"
    monkeypatch.setattr(machines, "ASK_TIMEOUT_S", 0.0)
    assert machines.this_machine(os.environ).ask("cuda") == {"trouble": "no answer within 0 s"}


def test_what_others_print_around_the_answer_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Asked:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def communicate(self, timeout: float) -> tuple[str, str]:
            return 'hello\n{"version": "1"}\nbye\n', ""

    monkeypatch.setattr(machines.subprocess, "Popen", Asked)
    assert machines.this_machine({}).ask("vllm") == {"version": "1"}


def test_a_process_that_no_signal_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk which hangs: the kernel lets nobody kill it."""
    waited: list[float] = []

    class Stuck:
        pid = 0

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def communicate(self, timeout: float) -> tuple[str, str]:
            waited.append(timeout)
            raise subprocess.TimeoutExpired("disk", timeout)

    monkeypatch.setattr(machines.subprocess, "Popen", Stuck)
    monkeypatch.setattr(machines.os, "killpg", lambda *_: waited.append(0.0))
    assert machines.this_machine({}).ask("disk") == {"trouble": "no answer within 180 s"}
    assert waited == [machines.ASK_TIMEOUT_S, 0.0, machines.KILL_S], "and not for ever"


def test_a_python_without_vllm_and_torch(tmp_path: Path) -> None:
    """An environment with nothing in it but what the package and its command line need."""
    venv.create(tmp_path, symlinks=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for name in _needed(_asked_for()):
        for path in importlib.metadata.files(name) or ():
            top = Path(str(path.locate()).removesuffix(str(path))) / path.parts[0]
            if ".." not in path.parts and not (site / top.name).exists():
                (site / top.name).symlink_to(top)
    code = "from continuum_connector.tools.cli import main; main()"
    done = subprocess.run(
        [tmp_path / "bin/python", "-c", code, "check", "--json"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    )
    assert done.stdout, done.stderr
    found = {line["subject"]: line for line in json.loads(done.stdout)["lines"]}
    assert found["vLLM"]["verdict"] == "error"
    assert found["plugin"]["verdict"] == "error", "nor is our entry point there"
    assert done.returncode == 1
    assert {"config", "scheduler", "NUMA", "DRAM", "native library"} <= set(found)


def _asked_for() -> list[str]:
    """What pyproject.toml says that the package and its extra `cli` need."""
    lists = re.findall(
        r"^(?:dependencies|cli) = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    return [name for each in lists for name in re.findall(r'"([\w-]+)', each)]


def _needed(names: list[str]) -> set[str]:
    """Those distributions and what they require, among what is installed."""
    found: set[str] = set()
    while names:
        name = names.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name not in found:
                wanted = importlib.metadata.requires(name) or []
                names += [re.match(r"[\w.-]+", each)[0] for each in wanted if "extra" not in each]
                found.add(name)
    return found
