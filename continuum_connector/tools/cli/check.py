"""`continuum check`: will it work here, and what to change if not?"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from continuum_connector.tools.checks.line import Line, Verdict, ok, several, worst
from continuum_connector.tools.checks.machine import this_machine
from continuum_connector.tools.checks.plan import UsageError
from continuum_connector.tools.checks.run import check as look
from continuum_connector.tools.cli import ending
from continuum_connector.tools.cli.pasted import looking, planned
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal

STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
    Verdict.UNSEEN: "dim",
}
STATUS = {
    Verdict.OK: ending.DONE,
    Verdict.WARNING: ending.DONE,
    Verdict.ERROR: ending.FAILED,
    Verdict.UNSEEN: ending.UNSEEN,
}


def check(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="What starts the server, pasted after two dashes; or a file; or -."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A folder, or a downloaded model; counts more than the pasted one.")
    ] = "",
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE", help="A line that may be not seen, like `PCIe link`. Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say whether ContinuumConnector works here, and what to change.

    Looks at vLLM, the flags, the model's KV cache, GPU, links, memory and disk. Changes nothing
    and downloads nothing. Paste what you serve with, or name the file that has it (- is standard
    input):

    \b
      continuum check -- vllm serve MODEL --kv-transfer-config '...'
      continuum check -- docker run --gpus all vllm/vllm-openai --model MODEL
      continuum check compose.yaml
      continuum check -- --model MODEL --tensor-parallel-size 2

    Status: 0 ok or warnings only; 1 an error; 2 wrong usage; 3 no error, but a line that is not
    seen: unknown is not ok, unless --accept names the line.
    """
    lines = _accepted(_look(list(command or ()), model), accept or ())
    with contextlib.suppress(BrokenPipeError):  # `| head`: the status still says what was found
        if as_json:
            print(json.dumps(as_object(lines), indent=1))
        else:
            show(terminal(), lines)
    raise typer.Exit(STATUS[worst(lines)])


def _accepted(lines: list[Line], subjects: Sequence[str]) -> list[Line]:
    """The lines, with those that the user accepts as not seen turned into ok."""
    return [
        ok(line.subject, f"not seen, which was accepted: {line.text}")
        if line.verdict is Verdict.UNSEEN and line.subject in subjects
        else line
        for line in lines
    ]


def _look(command: list[str], model: str) -> list[Line]:
    """All lines for the pasted command. `model`: counts more than the command's, if it is given."""
    try:
        plan, environ = planned(command, model)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    with looking():
        return list(look(this_machine(environ), plan))


def as_object(lines: list[Line]) -> dict[str, object]:
    """What --json prints: the worst verdict, and every line."""
    found = [{**line._asdict(), "verdict": line.verdict.value} for line in lines]
    return {"verdict": worst(lines).value, "lines": found}


def show(console: Console, lines: list[Line]) -> None:
    """Print a table on a terminal; into a pipe, one text line per finding, with its cure."""
    if console.is_terminal:
        console.print(_table(lines))
        console.print()
    else:
        for line in lines:
            cure = f" -> {line.cure}" if line.cure else ""
            text = f"{line.verdict.value:9}{line.subject:16}{line.text}{cure}"
            console.print(shown(text), soft_wrap=True)
    console.print(verdict(lines))


def _table(lines: list[Line]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        style = STYLES[line.verdict]
        cure = f"\n[cyan]{shown(line.cure)}[/]" if line.cure else ""
        word = f"[{style}]{line.verdict.value}[/]"
        table.add_row(word, shown(line.subject), shown(line.text) + cure)
    return table


def verdict(lines: list[Line]) -> str:
    """The last line: how many findings there are of each kind, and what that means."""
    count = Counter(line.verdict for line in lines)
    parts = [several(name, count[each]) for each, name in _COUNTED if count[each]]
    if count[Verdict.UNSEEN]:
        parts.append(f"{count[Verdict.UNSEEN]} not seen")
    said = f" ({', '.join(parts)})" if parts else ""
    so_what = {
        Verdict.OK: "Nothing in the way of ContinuumConnector",
        Verdict.WARNING: "ContinuumConnector works, and could work better",
        Verdict.ERROR: "ContinuumConnector will not do here what was asked of it",
        Verdict.UNSEEN: "Whether ContinuumConnector works here is not known",
    }
    dark = list(dict.fromkeys(each.subject for each in lines if each.verdict is Verdict.UNSEEN))
    look_at = f": look at {', '.join(dark)}" if worst(lines) is Verdict.UNSEEN else ""
    return f"{so_what[worst(lines)]}{said}{look_at}."


_COUNTED = ((Verdict.ERROR, "error"), (Verdict.WARNING, "warning"))
