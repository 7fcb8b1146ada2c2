"""All commands and their options, found by looking: a new one is played with by itself."""

from __future__ import annotations

import argparse
import contextlib
import enum
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import patch

import typer

ROOT = Path(__file__).resolve().parents[2]
MAIN = re.compile(r"""^if __name__ == ["']__main__["']:""", re.MULTILINE)
LEFT_OUT = {
    "bench.serve.rivals": "installs LMCache",
    "bench.serve.commands": "is `continuum bench`",
}
REWRITES = ("--write",)  # files of the repository


@dataclass(frozen=True)
class Param:
    """An option, or an argument (no `flag`). `kind`: int, float, path, flag, choice or text."""

    flag: str
    name: str
    kind: str
    default: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False
    many: bool = False


@dataclass(frozen=True)
class Command:
    """What is typed, and how it is begun in this process: `start` reads sys.argv and leaves by
    SystemExit, as the process would."""

    title: str
    start: Callable[[], object]
    words: tuple[str, ...]
    params: tuple[Param, ...] = field(repr=False)


def commands() -> list[Command]:
    """Those of `continuum`, of `continuum bench`, and each module of bench/ that can be run."""
    from bench.serve.commands import app as bench
    from bench.sim.command import app as lab
    from continuum_connector.tools.cli.app import app

    apps = {"continuum": (app, lab), "continuum bench": (bench,)}
    found = [each for title, of in apps.items() for one in of for each in _of_app(title, one)]
    return [*found, *filter(None, map(_of_module, modules()))]


def modules() -> list[str]:
    """Modules below bench/ that `python -m` runs."""
    paths = sorted((ROOT / "bench").rglob("*.py"))
    names = [
        _module(path)
        for path in paths
        if MAIN.search(text := path.read_text()) and "parse_args" in text
    ]
    return [name for name in names if name not in LEFT_OUT]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def _of_app(title: str, app: typer.Typer) -> Iterator[Command]:
    group: Any = typer.main.get_command(app)
    for info in app.registered_commands:
        name = info.name or info.callback.__name__.replace("_", "-")
        hints = get_type_hints(info.callback)
        command = group.commands[name] if hasattr(group, "commands") else group
        known = [each for each in command.params if each.name in hints]
        params = tuple(_of_typer(each, hints[each.name]) for each in known)
        yield Command(f"{title} {name}", _continuum, (*title.split(), name), params)


def _continuum() -> None:
    from continuum_connector.tools.cli import main

    main()


def _of_typer(param: Any, hint: Any) -> Param:
    """`hint`: the type of the function's own parameter, which is the same with every typer."""
    plain = {bool: "flag", int: "int", float: "float", Path: "path", str: "text"}
    inner = [each for each in (hint, *_inside(hint)) if isinstance(each, type)]
    kind = next((plain[each] for each in inner if each in plain), "text")
    choices = next((tuple(m.value for m in e) for e in inner if issubclass(e, enum.Enum)), ())
    default = "" if param.default is None or callable(param.default) else str(param.default)
    flag = param.opts[0] if param.param_type_name == "option" else ""
    many = any(get_origin(each) is list for each in (hint, *get_args(hint)))
    kind = "choice" if choices else kind
    return Param(flag, param.name, kind, default, choices, param.required, many and not flag)


def _inside(hint: Any) -> Iterator[Any]:
    for each in get_args(hint):
        yield each
        yield from _inside(each)


def _of_module(name: str) -> Command | None:
    """None where it cannot be imported here, for want of vLLM."""

    def start() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    params = _params(start)
    return None if params is None else Command(f"python -m {name}", start, (name,), params)


class _FoundError(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _plainly(work: Callable[[], object], _: str) -> int:
    work()
    return 0


def _params(start: Callable[[], object]) -> tuple[Param, ...] | None:
    def caught(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _FoundError(parser)

    with (
        patch.object(argparse.ArgumentParser, "parse_args", caught),
        patch.object(sys, "argv", ["fuzz"]),
        patch("continuum_connector.tools.cli.ending.run", _plainly),
        contextlib.redirect_stderr(None),
    ):
        try:
            start()
        except _FoundError as found:
            return tuple(map(_of_action, _shown(found.parser)))
        except (SystemExit, ImportError):
            return None
    return None


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = argparse._HelpAction
    return [
        each
        for each in parser._actions
        if not isinstance(each, hidden) and not set(each.option_strings) & set(REWRITES)
    ]


def _of_action(action: argparse.Action) -> Param:
    kinds: dict[Any, str] = {int: "int", float: "float", Path: "path"}
    kind = "flag" if action.nargs == 0 else kinds.get(action.type, "text")
    kind = "choice" if action.choices else kind
    default = "" if action.default in (None, argparse.SUPPRESS) else str(action.default)
    flag = action.option_strings[-1] if action.option_strings else ""
    many = action.nargs in ("+", "*")
    choices = tuple(map(str, action.choices or ()))
    return Param(flag, action.dest, kind, default, choices, not flag, many)
