"""`continuum bench`: hands over to bench/serve."""

from __future__ import annotations

from typing import Any

import typer

from continuum_connector.cli.find_bench import find_bench
from continuum_connector.cli.reading import command

# Options and help are those of bench/serve.
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def bench(context: typer.Context) -> None:
    """Put agents on a server, compare ways to serve, compare two results."""
    with command("bench"):
        commands = find_bench("bench.serve.commands")
    commands.app(args=context.args, prog_name="continuum bench")
