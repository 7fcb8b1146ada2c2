"""Every command in the docs is one that exists, and says who runs it.

In front of each block of commands stands one of

    <!-- run -->                        cheap: this test runs it, and it must succeed
    <!-- test: tests/x.py, ... -->      these tests run it, says its author; checked is only
                                        that the words it uses occur in those files
    <!-- gpu -->                        needs a GPU, a real model or somebody's cluster
    <!-- long: why -->                  takes too long for a test, or needs what no test has

Whatever the mark, options, targets, modules and config keys must exist.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import typer

from continuum_connector.config import ADMIN_KEY, ENV_PREFIX, KNOBS, POLICIES, load_config
from continuum_connector.observe.account import PUBLISHED
from continuum_connector.tools.cli.app import app
from continuum_connector.tools.cli.ending import TRACEBACK
from tests.markdown import ROOT, Block, blocks, documents

BLOCKS = [block for path in documents() for block in blocks(path)]
CURE = "put <!-- run -->, <!-- test: FILE -->, <!-- gpu --> or <!-- long: WHY --> in front of it"
# Beside the named test, the place where tests start servers.
STARTER = ROOT / "bench" / "serve" / "server.py"
OURS = "ContinuumConnector"
FOR_OPERATORS = ("README.md", "docs/", "deploy/")
VARIABLES = {ADMIN_KEY, TRACEBACK, *(ENV_PREFIX + key.upper() for key in KNOBS)}
METRIC = r"\bcontinuum:[a-z]\w+"


# --- marks ------------------------------------------------------------------------------
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_of_commands_is_fenced_and_marked(block: Block) -> None:
    assert block.fenced, f"{block}: indented commands; write them as ```bash, and {CURE}"
    assert block.mark, f"{block}: nobody runs this block; {CURE}"
    assert block.mark != "long" or block.argument, f"{block}: say why: <!-- long: WHY -->"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "run"], ids=str)
def test_a_cheap_block_runs(block: Block, tmp_path: Path) -> None:
    entry = shlex.quote("from continuum_connector.tools.cli import main; main()")
    _command(tmp_path / "continuum", f"-c {entry}")
    for name in ("python", "python3"):
        _command(tmp_path / name, "")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NO_COLOR": "1"}
    script = "\n".join(_lines(block))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "test"], ids=str)
def test_the_file_that_a_test_mark_names_exists_and_holds_the_words_of_the_block(
    block: Block,
) -> None:
    text = STARTER.read_text()
    for name in re.split(r",\s*", block.argument):
        assert (ROOT / name).is_file(), f"{block}: no test {name}"
        text += (ROOT / name).read_text()
    missing = [word for words in _commands(block) for word in _key_words(words) if word not in text]
    assert not missing, f"{block}: {block.argument} does not name {missing}, so cannot run this"


def _command(path: Path, arguments: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
    path.chmod(0o755)


# --- what a block says ------------------------------------------------------------------
def _lines(block: Block) -> list[str]:
    """Its commands: all lines, or those behind a prompt where there is one."""
    lines = block.text.splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return prompted or lines


def _commands(block: Block) -> Iterator[list[str]]:
    """Its simple commands as words, without what only joins them."""
    pending = ""
    for line in "\n".join(_lines(block)).replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            words = list(_lexer(pending))
        except ValueError:  # a quote goes on in the next line
            continue
        pending = ""
        for joined, group in groupby(words, lambda word: set(word) <= set("();<>|&")):
            if not joined:
                yield list(group)
    assert not pending, f"{block}: a quote is not closed"


def _lexer(text: str) -> shlex.shlex:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return lexer


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables in front of a command, and the command."""
    words = words[1:] if words[:1] == ["export"] else words
    count = next((i for i, w in enumerate(words) if not re.match(r"\w+=", w)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def _key_words(words: list[str]) -> list[str]:
    """What a test must name if it runs this command."""
    variables, command = _split(words)
    found = [name for name in variables if name.startswith(ENV_PREFIX)]
    if command[:1] == ["continuum"]:
        found += command[1:2]
    if command[:2] == ["vllm", "serve"] or command[:1] == ["vllm-router"]:
        found += _options(command)
    return found


# --- what there is ----------------------------------------------------------------------
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_a_block_uses_exists(block: Block) -> None:
    wrong = [f"{shlex.join(words)}: {w}" for words in _commands(block) for w in _wrong(words)]
    assert not wrong, f"{block}\n" + "\n".join(wrong)


def _wrong(words: list[str]) -> Iterator[str]:
    variables, command = _split(words)
    for name in variables:
        if name.startswith(ENV_PREFIX) and name not in VARIABLES:
            yield f"no key {name}"
    if not command:
        return
    known: set[str] | None = None
    if command[0] == "continuum":
        known = _cli_options(*command[1:3])
        if "--" in command:  # what follows is pasted
            command = command[: command.index("--")]
    elif command[0] == "make":
        yield from (f"no target {word}" for word in _targets(command) if word not in _makefile())
    elif command[0].startswith("scripts/") and not (ROOT / command[0]).exists():
        yield "no such script"
    elif command[:2] == ["vllm", "serve"]:
        known = _vllm_options()
        yield from _wrong_transfer(command)
    elif command[0] == "pip":
        yield from _wrong_extras(command)
    elif command[0] in ("python", "python3") and command[1:2] == ["-m"]:
        known = _module_options(command[2])
        command = command[2:]
    if known is not None:
        yield from (f"no option {o}" for o in _options(command[1:]) if o not in known)


@cache
def _cli_options(name: str, nested: str = "") -> set[str]:
    if name.startswith("-"):
        return _all_options(typer.main.get_command(app))
    if name == "bench":  # hands over to the commands of bench/serve
        from bench.serve import commands

        return _options_of(commands.app, nested)
    if name == "simulate":  # hands over to the lab
        from bench.sim import command

        return _all_options(typer.main.get_command(command.app))
    return _options_of(app, name)


def _options_of(application: typer.Typer, name: str) -> set[str]:
    group: Any = typer.main.get_command(application)
    assert name in group.commands, f"no command {name}"
    return _all_options(group.commands[name])


def _all_options(command: Any) -> set[str]:
    return {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}


@cache
def _makefile() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _targets(command: list[str]) -> list[str]:
    return [word for word in command[1:] if "=" not in word and not word.startswith("-")]


def _wrong_extras(command: list[str]) -> Iterator[str]:
    project = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"(?:continuum-connector|\.)\[(.*?)\]", " ".join(command)):
        for extra in extras.split(","):
            if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
                yield f"no extra {extra}"


def _wrong_transfer(command: list[str]) -> Iterator[str]:
    """Our keys in --kv-transfer-config, also inside a MultiConnector."""
    if "--kv-transfer-config" not in command:
        return
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra = config.get("kv_connector_extra_config", {})
    children = [config, *extra.get("connectors", ())]
    if not any(child["kv_connector"] == OURS for child in children):
        yield f"does not name {OURS}"
    for child in children:
        if child["kv_connector"] == OURS:
            load_config(child.get("kv_connector_extra_config", {}), {})


@cache
def _module_options(module: str) -> set[str] | None:
    """The options in a module's --help; None where it says nothing of them."""
    if not module.startswith(("bench.", "tests.")):
        return None
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or path.is_dir(), f"no module {module}"
    return _said_options([sys.executable, "-m", module, "--help"])


@cache
def _vllm_options() -> set[str] | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    return _said_options(line)


def _said_options(line: list[str]) -> set[str]:
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{shlex.join(line)}\n{done.stderr[-2000:]}"
    return {"--help", *re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout)}


@pytest.mark.parametrize("path", [p for p in documents() if p.startswith(FOR_OPERATORS)])
def test_metrics_and_keys_that_a_document_names_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    metrics = {re.sub(r"_(total|bucket|sum|count)$", "", n) for n in re.findall(METRIC, text)}
    arms = {f"continuum:{policy}" for policy in POLICIES}  # of bench ab
    assert metrics - arms <= {metric.full_name for metric in PUBLISHED}
    assert set(re.findall(rf"{ENV_PREFIX}[A-Z]\w+", text)) <= VARIABLES
