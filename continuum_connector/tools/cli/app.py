"""The commands of `continuum`. Each is imported here, and none imports vLLM or torch."""

from __future__ import annotations

import typer

from continuum_connector.tools.cli.analyze import analyze, convert
from continuum_connector.tools.cli.bench import PASSED_ON, bench, simulate
from continuum_connector.tools.cli.calibrate import calibrate
from continuum_connector.tools.cli.check import check
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
    rich_markup_mode="rich",
)

app.command()(check)
app.command()(size)
app.command()(top)
app.command()(calibrate)
app.command()(explain)
app.command()(analyze)
app.command()(convert)
app.command(context_settings=PASSED_ON)(bench)
app.command()(simulate)
