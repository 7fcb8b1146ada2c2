"""`continuum bench`: hands over to bench/serve, which the source has and the wheel does not."""

from __future__ import annotations

import importlib
from typing import Any

import typer

from continuum_connector.cli.reading import command
from continuum_connector.cli.server import CommandError

# Options and help are those of bench/serve.
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def bench(context: typer.Context) -> None:
    """Put agents on a server, compare ways to serve, compare two results."""
    with command("bench"):
        commands = _find()
    commands.app(args=context.args, prog_name="continuum bench")


def _find() -> Any:
    try:
        return importlib.import_module("bench.serve.commands")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "bench":
            raise CommandError(
                "the benchmarks are not in the installed package; run it from a checkout of "
                "the source: PYTHONPATH=. continuum bench ..."
            ) from None
        raise CommandError(
            f"the benchmarks need the package {error.name}; "
            "install it with: pip install '.[bench]' in the clone"
        ) from None
