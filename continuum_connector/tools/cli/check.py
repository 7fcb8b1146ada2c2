"""`continuum check`: will it work here, and what to change if not?"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from continuum_connector.errors import ToldError
from continuum_connector.tools.checks import (
    Line,
    Verdict,
    disk,
    hardware,
    model,
    ok,
    serving,
    several,
    worst,
)
from continuum_connector.tools.checks.machine import CudaSeen, Machine, VllmSeen, this_machine
from continuum_connector.tools.checks.plan import Plan, as_vllm_reads, planned
from continuum_connector.tools.cli import ending
from continuum_connector.tools.cli.terminal import Command, looking, terminal
from continuum_connector.tools.cli.terminal import name as shown

FAILS = "ContinuumConnector will not do here what was asked of it"
# How each looks, with which status the command ends, and what that means.
MEANS = {
    Verdict.OK: ("green", ending.DONE, "Nothing in the way of ContinuumConnector"),
    Verdict.WARNING: ("yellow", ending.DONE, "ContinuumConnector works, and could work better"),
    Verdict.ERROR: ("bold red", ending.FAILED, FAILS),
    Verdict.UNSEEN: ("dim", ending.UNSEEN, "Whether ContinuumConnector works here is not known"),
}


def check(
    command: Command = None,
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
    try:
        plan, environ = planned(command or [], model)
    except ToldError as error:
        raise typer.BadParameter(str(error)) from None
    with looking():
        lines = list(look(this_machine(environ), plan))
    lines = [
        ok(line.subject, f"not seen, which was accepted: {line.text}")
        if line.verdict is Verdict.UNSEEN and line.subject in (accept or ())
        else line
        for line in lines
    ]
    found = worst(lines)
    with contextlib.suppress(BrokenPipeError):  # `| head`: the status still says what was found
        if as_json:
            told = [{**line._asdict(), "verdict": line.verdict.value} for line in lines]
            print(json.dumps({"verdict": found.value, "lines": told}, indent=1))
        else:
            show(terminal(), lines)
    raise typer.Exit(MEANS[found][1])


def look(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Every line, in the order in which a server would meet what they are about. Takes seconds,
    because another process imports vLLM."""
    vllm = machine.see("vllm", VllmSeen, *plan.words)
    cuda = machine.see("cuda", CudaSeen)
    plan = as_vllm_reads(plan, vllm.options, machine.environ)
    yield from serving.lines(machine, plan, vllm)
    yield from model.lines(machine, plan, vllm)
    yield from hardware.lines(machine, plan, vllm, cuda)
    yield from disk.lines(machine, plan)


def show(console: Console, lines: list[Line]) -> None:
    """Print a table on a terminal; into a pipe, one text line per finding, with its cure."""
    names = Column(no_wrap=True), Column(no_wrap=True)
    table = Table.grid(*names, Column(overflow="fold"), padding=(0, 2))
    for line in lines:
        word = line.verdict.value
        if console.is_terminal:
            cure = f"\n[cyan]{shown(line.cure)}[/]" if line.cure else ""
            word = f"[{MEANS[line.verdict][0]}]{word}[/]"
            table.add_row(word, shown(line.subject), shown(line.text) + cure)
        else:
            cure = f" -> {line.cure}" if line.cure else ""
            text = shown(f"{word:9}{line.subject:16}{line.text}{cure}")
            console.print(text, soft_wrap=True)
    if console.is_terminal:
        console.print(table)
        console.print()
    console.print(verdict(lines))


def verdict(lines: list[Line]) -> str:
    """The last line: how many findings there are of each kind, and what that means."""
    count, found = Counter(line.verdict for line in lines), worst(lines)
    counted = [each for each in (Verdict.ERROR, Verdict.WARNING) if count[each]]
    parts = [several(each.value, count[each]) for each in counted]
    parts += [f"{num} not seen"] if (num := count[Verdict.UNSEEN]) else []
    said = f" ({', '.join(parts)})" if parts else ""
    dark = dict.fromkeys(each.subject for each in lines if each.verdict is Verdict.UNSEEN)
    look_at = f": look at {', '.join(dark)}" if found is Verdict.UNSEEN else ""
    return f"{MEANS[found][2]}{said}{look_at}."
