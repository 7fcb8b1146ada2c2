"""`continuum bench`, `continuum simulate`: they hand over to bench/serve and to the lab, bench/sim.

The source tree has `bench` beside the package. A wheel has it inside, because a top-level package
of that name could clash with others.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import typer

from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import terminal

PACKAGE = Path(__file__).parents[2]
# Options and help are those of bench.
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def bench(context: typer.Context) -> None:
    """Put agents on a server, compare ways to serve, compare results."""
    commands = find_bench("bench.serve.commands")
    commands.app(args=context.args, prog_name="continuum bench")


def find_bench(module: str) -> Any:
    """Import a module of `bench`. CommandError says what is missing."""
    file = Path(*module.split(".")).with_suffix(".py")
    for home in (PACKAGE.parent, PACKAGE / "_bench"):
        if (home / file).is_file():
            sys.path.insert(0, str(home))
            return _import(module)
    raise CommandError(
        f"{module} is not there, so this installation is not whole; install it again: "
        "pip install --force-reinstall --no-deps . in a clone"
    )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"this needs the package {error.name}, which is not installed; all but vLLM comes "
            "with: pip install '.[bench]' in a clone"
        ) from None


def simulate(context: typer.Context) -> None:
    """What would a policy do, on a GPU and a load that are not here?"""
    lab = find_bench("bench.sim.command")
    raise typer.Exit(lab.main(context.args, terminal()))
