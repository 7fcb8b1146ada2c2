"""`--help` of every command on a terminal of 80 columns: nothing is cut off or wrapped twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from bench.serve import commands
from bench.sim import command as lab
from continuum_connector.tools.cli.app import app

COLUMNS = 80
APPS = {"continuum": app, "continuum bench": commands.app}


def walk() -> Iterator[tuple[str, Any]]:
    """Each app and each command, with the words that a user types."""
    for name, each in APPS.items():
        group: Any = typer.main.get_command(each)
        yield name, group
        for sub, found in group.commands.items():
            if sub == "simulate":  # its help is the lab's
                yield f"{name} {sub}", typer.main.get_command(lab.app)
            elif sub != "bench":  # its help is that of the other app
                yield f"{name} {sub}", found


EVERY = dict(walk())


def lines_of(typed: str) -> list[str]:
    words = typed.removeprefix("continuum").split()
    is_bench = words[:1] == ["bench"]
    chosen = APPS["continuum bench" if is_bench else "continuum"]
    line = [*words[is_bench:], "--help"]
    result = CliRunner().invoke(chosen, line, env={"COLUMNS": str(COLUMNS)})
    assert result.exit_code == 0, result.output
    return [each.rstrip() for each in result.output.splitlines()]


@pytest.mark.parametrize("typed", EVERY)
def test_it_fits_80_columns_and_cuts_nothing_off(typed: str) -> None:
    lines = lines_of(typed)
    assert max(map(len, lines)) <= COLUMNS
    said = "\n".join(lines)
    assert "…" not in said, "a name of an option"
    assert not re.search(r"\.\.\.$", re.sub(r"^Usage.*", "", said), re.MULTILINE), (
        "a command's help"
    )
    assert "[bold]" not in said
    for option in EVERY[typed].params:
        assert all(name in said for name in option.opts if name.startswith("--"))


@pytest.mark.parametrize("typed", EVERY)
def test_a_paragraph_is_wrapped_once(typed: str) -> None:
    """A line ends where the next word has no room, not where the source's line ended."""
    lines = lines_of(typed)
    for paragraph in (EVERY[typed].help or "").split("\n\n"):
        if "\b" in paragraph:  # as it is written
            assert all(f"  {each}".rstrip() in lines for each in written(paragraph)), paragraph
            continue
        words = paragraph.split()
        at = next(i for i, line in enumerate(lines) if line.split()[:4] == words[:4])
        told: list[str] = []
        while len(told) < len(words):
            told += lines[at].split()
            room = COLUMNS - 2 - len(lines[at])
            assert len(told) == len(words) or len(words[len(told)]) >= room, lines[at]
            at += 1
        assert told == words


def written(paragraph: str) -> list[str]:
    return [line for line in paragraph.split("\n") if line.strip(" \b")]
