"""No traceback reaches a user: every command with values that nobody should type (tests/fuzz), and
a table of what needs a process of its own: signals, locales, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("aiohttp")
from bench.tests import ab_results
from continuum_connector.errors import ToldError
from continuum_connector.tools.cli import ending, server
from continuum_connector.tools.cli.server import Server
from tests.fuzz.commands import ROOT, Command, commands, modules
from tests.fuzz.many import HEAVY, without
from tests.fuzz.play import play
from tests.fuzz.servers import Servers, servers
from tests.fuzz.values import RECORD

RUNS, LIMIT_S = 260, 0.2
MAIN = "from continuum_connector.tools.cli import main; main()"
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
ENVIRON.pop("PYTHONUNBUFFERED", None)


@pytest.fixture
def hostile() -> Iterator[Servers]:
    with servers() as listening:
        yield listening


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    names = (":smile: [red] [/] \x1b[31mred", "two\nlines \u202e", "ünï")
    records = [{**RECORD, "event": "decision", "program": name} for name in names]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_whatever_is_typed_ends_with_a_sentence_and_a_status() -> None:
    """In a process of its own: in pytest's, what other tests have loaded of vLLM is there."""
    words = ["--runs", str(RUNS), "--seed", "1", "--limit", str(LIMIT_S)]
    played = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *words]
    done = subprocess.run(played, cwd=ROOT, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{RUNS} runs, 0 faults" in done.stdout


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_command_is_played_with() -> None:
    """What `python -m` runs reads its options with argparse, where they can be found."""
    with without(HEAVY):
        titles = {command.title for command in commands()}
    assert {"continuum top", "continuum bench compare", "python -m bench.sim.validate"} <= titles
    for name in modules():
        path = ROOT / name.replace(".", "/")
        text = (path.with_suffix(".py") if not path.is_dir() else path / "__main__.py").read_text()
        assert "parse_args(" in text, name
        assert "    start(main" in text or "    start(lambda" in text, name


def test_time_that_is_over_as_a_command_leaves_ends_no_other(tmp_path: Path) -> None:
    """`leave` sets SIGINT to what ends a process: a clock that rings then must not."""

    def start() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGALRM)
        raise SystemExit(0)

    played = play(Command("late", start, ("late",), ()), [], tmp_path, {}, "utf-8", 30.0)
    assert (played.code, played.fault) == (0, "")


# --- servers ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url",
    [
        "http://user:geheim@127.0.0.1:1",
        "user:geheim@host",
        "http://u:ge/heim@host",
        "ftp://u:geheim@host:1",
        "http://h:1/?api_key=geheim",
        "http://u:geheim@[::1",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ToldError) as told:
        Server(url)
    assert "heim" not in str(told.value)
    assert "host" in str(told.value) or "address" in str(told.value)


def test_an_address_with_brackets_keeps_them() -> None:
    assert Server("http://[::1]:80/v1").url == "http://[::1]:80"


def test_an_answer_that_trickles_ends_with_the_time(hostile: Servers) -> None:
    with pytest.raises(ToldError, match=r"not whole within 0\.2 s"):
        Server(f"{hostile.base}/drip", timeout_s=0.2).scrape(0.0)


def test_an_answer_without_end_is_read_no_further(
    hostile: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 1 << 20)
    with pytest.raises(ToldError, match="more than 1 MiB"):
        Server(f"{hostile.base}/endless", timeout_s=600.0).scrape(0.0)


# --- endings ------------------------------------------------------------------------------
def test_a_bug_is_called_one_and_its_traceback_is_there_for_who_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> None:
        raise ZeroDivisionError("x\n" * 9)

    assert ending.run(wrong, "continuum x") == ending.BUG == 70
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("continuum x: a bug of ours (ZeroDivisionError: x x")
    monkeypatch.setenv(ending.TRACEBACK, "1")
    with pytest.raises(ZeroDivisionError):
        ending.run(wrong, "continuum x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h:1/ is it", "http://***@h:1/ is it"),
        ("at 'u:p@h'", "at '***@h'"),
        ("http://h/?a=b&api_key=x1 y", "http://h/?a=b&api_key=*** y"),
        ("nobody@home", "nobody@home"),
    ],
)
def test_secrets_are_blacked_out(text: str, shown: str) -> None:
    assert ending.hidden(text) == shown


def test_a_long_value_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    ending.tell("x", "begin " + "y" * 9999 + " end")
    said = capsys.readouterr().err
    assert len(said) < ending.MOST + 20
    assert said.startswith("x: begin yy")
    assert said.endswith("y end\n")


# --- processes ----------------------------------------------------------------------------
def run(words: list[str], code: str = MAIN, **more: object) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {"capture_output": True, "text": True, "env": ENVIRON, **more}
    return subprocess.run([sys.executable, "-c", code, *words], check=False, **options)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_old_terminal_gets_names_it_can_show(trace: Path, encoding: str) -> None:
    environ = {**ENVIRON, "PYTHONIOENCODING": encoding, "COLUMNS": "0"}
    done = run(["explain", "--trace", str(trace)], env=environ, text=False)
    said = done.stdout.decode(encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert ":smile: [red]" in said or "[red] [/] \\x1b[31mred" in said
    assert "two\\nlines \\u202e" in said
    assert ("ünï" in said) == (encoding == "latin-1")


def test_the_c_locale_is_no_trouble(trace: Path) -> None:
    environ = {**ENVIRON, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(["analyze", str(trace)], env={**environ, "COLUMNS": "²"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "turns" in done.stdout


SHORT = ["size", "--json", "--programs", "3", "--bytes-per-token", "1KiB"]  # written at its end


@pytest.mark.parametrize("words", [SHORT, ["analyze"]], ids=["at the end", "as it is drawn"])
def test_a_full_disk_is_told_once(trace: Path, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False}
        done = run(words if words is SHORT else [*words, str(trace)], **options)
    assert done.returncode == 1
    assert done.stderr == (
        "continuum: what it prints cannot be written (No space left on device)\n"
    )


@pytest.mark.parametrize("columns", ["²", "0", "9" * 5000])
def test_a_width_that_is_none_is_forgotten(trace: Path, columns: str) -> None:
    done = run(["analyze", str(trace)], env={**ENVIRON, "COLUMNS": columns, "LINES": columns})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [SHORT, ["analyze"], ["explain", "--trace"]])
def test_a_reader_that_has_gone_is_no_failure(trace: Path, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        options = {"stdout": closed, "stderr": subprocess.PIPE, "capture_output": False}
        done = run(words if words is SHORT else [*words, str(trace)], **options)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_was_closed_before_is_no_failure(trace: Path) -> None:
    line = f"exec {sys.executable} -c '{MAIN}' analyze {trace} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=ENVIRON, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_ctrl_c_while_it_is_loaded_ends_without_a_word(tmp_path: Path, package: str) -> None:
    press = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)"
    (tmp_path / f"{package}.py").write_text(press)
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run(["--help"], env=environ)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_command_says_which_package_it_lacks(package: str) -> None:
    done = run(["--version"], f"import sys; sys.modules[{package!r}] = None; {MAIN}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"continuum: this needs the package {package}, which is not")
    assert "pip install '.[cli]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_bench_compare_needs_nothing_but_the_files(tmp_path: Path) -> None:
    for arm, factor in (("none", 1.0), ("continuum:adaptive", 0.5)):
        ab_results.measured(tmp_path, ab_results.run_of(arm), factor)
    lack = "import sys\nfor name in ('vllm', 'torch', 'aiohttp', 'openai', 'matplotlib', 'zmq'):\n"
    lack += "    sys.modules[name] = None\n"
    done = run(["bench", "compare", str(tmp_path), str(tmp_path)], lack + MAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "continuum:adaptive" in done.stdout
