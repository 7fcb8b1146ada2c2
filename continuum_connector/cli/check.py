"""`continuum check`: will it work here, and what to change if not?"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from continuum_connector.checks.command_line import UsageError, read_plan, split_environment
from continuum_connector.checks.line import Line, Verdict, worst
from continuum_connector.checks.machine import this_machine
from continuum_connector.checks.run import check as look
from continuum_connector.checks.words import several

STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
    Verdict.UNSEEN: "dim",
}


def check(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The whole `vllm serve ...`, pasted behind two dashes."),
    ] = None,
    model: Annotated[str, typer.Option(help="A folder, or a model that is downloaded.")] = "",
    kv_transfer_config: Annotated[
        str, typer.Option(help="The JSON that vLLM gets. Empty: ours, with its defaults.")
    ] = "",
    prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="As served.")
    ] = True,
    scheduler_cls: Annotated[str, typer.Option(help="A scheduler of your own.")] = "",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of the model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say whether ContinuumConnector will work here, and what to change if not.

    Looks at vLLM, the flags, the model's KV cache, GPU, links and memory; changes nothing and
    downloads nothing. Paste the command line you serve with, or give the options that matter:

        continuum check -- vllm serve MODEL --kv-transfer-config '{"kv_connector": ...}'

        continuum check --model MODEL --tensor-parallel-size 2

    Ends with status 1 if a line is an error, else 0.
    """
    options = {
        "--model": model,
        "--kv-transfer-config": kv_transfer_config,
        "--scheduler-cls": scheduler_cls,
        "--tensor-parallel-size": str(tensor_parallel_size) if tensor_parallel_size > 1 else "",
    }
    given = [word for name, value in options.items() if value for word in (name, value)]
    given += [] if prefix_caching else ["--no-enable-prefix-caching"]
    lines = _look(list(command or ()), given)
    if as_json:
        typer.echo(json.dumps(as_object(lines), indent=1))
    else:
        show(Console(highlight=False), lines)
    if worst(lines) is Verdict.ERROR:
        raise typer.Exit(1)


def _look(command: list[str], given: list[str]) -> list[Line]:
    """All lines for the command pasted; `given` are options of our own, which win."""
    if len(command) == 1 and " " in command[0]:
        command = shlex.split(command[0])
    assigned, words = split_environment(command)
    environ = {**os.environ, **assigned}
    try:
        plan = read_plan([*words, *given], environ)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(stderr=True)
    if not console.is_terminal:
        return list(look(this_machine(environ), plan))
    with console.status("looking at vLLM, driver and machine"):
        return list(look(this_machine(environ), plan))


def as_object(lines: list[Line]) -> dict[str, object]:
    """What --json prints: the worst verdict, and every line."""
    found = [{**line._asdict(), "verdict": line.verdict.value} for line in lines]
    return {"verdict": worst(lines).value, "lines": found}


def show(console: Console, lines: list[Line]) -> None:
    """A table for eyes; for a pipe one line each, cure included."""
    if console.is_terminal:
        console.print(_table(lines))
        console.print()
    else:
        for line in lines:
            cure = f" -> {line.cure}" if line.cure else ""
            text = f"{line.verdict.value:9}{line.subject:16}{line.text}{cure}"
            console.print(escape(text), soft_wrap=True)
    console.print(verdict(lines))


def _table(lines: list[Line]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        style = STYLES[line.verdict]
        cure = f"\n[cyan]{escape(line.cure)}[/]" if line.cure else ""
        word = f"[{style}]{line.verdict.value}[/]"
        table.add_row(word, escape(line.subject), escape(line.text) + cure)
    return table


def verdict(lines: list[Line]) -> str:
    """The last line: how many of what, and so what."""
    count = Counter(line.verdict for line in lines)
    parts = [several(name, count[each]) for each, name in _COUNTED if count[each]]
    if count[Verdict.UNSEEN]:
        parts.append(f"{count[Verdict.UNSEEN]} not seen")
    said = f" ({', '.join(parts)})" if parts else ""
    so_what = {
        Verdict.OK: "Nothing in the way of ContinuumConnector",
        Verdict.WARNING: "ContinuumConnector works, and could work better",
        Verdict.ERROR: "ContinuumConnector will not do here what was asked of it",
    }
    return f"{so_what[worst(lines)]}{said}."


_COUNTED = ((Verdict.ERROR, "error"), (Verdict.WARNING, "warning"))
