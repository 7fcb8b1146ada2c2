"""`continuum convert`: our trace for scripts of the original recorder, anybody's for `continuum
simulate` and `continuum bench agents`."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from continuum_connector import files
from continuum_connector.tools.analysis import foreign
from continuum_connector.tools.analysis.recorded import Request, of_records
from continuum_connector.tools.analysis.source import Source, write_original
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import Force, may_write, records


class Format(str, enum.Enum):
    """The formats that a trace can be converted to."""

    SCHEDULER_TIMESTAMPS = "scheduler_timestamps"
    REQUESTS = "requests"


def convert(
    trace: Annotated[
        Path, typer.Argument(help="The file that trace_path names, or somebody else's; a folder.")
    ],
    to: Annotated[
        Format | None, typer.Option(help="Left out: requests for what others recorded.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Empty: the format's own name, here.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a trace in another form.

    scheduler_timestamps: as the original recorder would have written our trace, one JSON file, job
    -> time stamps. It leaves out loads and stores, reasons, and worth. Its hit_length is what was
    found in VRAM and DRAM together.

    requests: a JSON line per request with its lengths, its gap, and what it has in common with the
    one before. It is made of our traces, and of what others record: Mooncake, Bailian, Weka,
    AgentX, trajectories of SWE-agent and its mini form, events of OpenHands. A simulation takes
    such files as they are, too:

    \b
      continuum simulate --workload TRACE
    """
    source = None if trace.is_dir() else Source(trace)
    is_ours = source is not None and source.is_known
    if to is None:
        to = Format.SCHEDULER_TIMESTAMPS if is_ours else Format.REQUESTS
    path = out or Path(to.value)
    if not path.name:
        raise CommandError(f"--out {path} names no file; give one")
    may_write(path, force, [source] if source else [])
    if to is Format.REQUESTS:
        text, said = _requests(trace, source if is_ours else None)
    elif source is not None and is_ours:
        jobs = write_original(records(source))
        text = json.dumps(jobs, indent=2)
        said = f"{len(jobs):,} programs written to {path}; {source.num_bad:,} lines skipped"
    else:
        raise CommandError(f"{trace} has no decisions to be told as {to.value}; leave --to out")
    try:
        files.put(path, text.encode())
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from None
    print(said if to is not Format.REQUESTS else f"{said} written to {path}")


def _requests(trace: Path, source: Source | None) -> tuple[str, str]:
    """The lines, and how many there are of what."""
    if source is not None:
        found = list(of_records(records(source)))
        name, note = "ContinuumConnector", "answers of 1 token"
        if not found:
            raise CommandError(f"{trace} has no turn that was admitted, so there is none to play")
    else:
        name, found, note = foreign.read(trace)
    told = f" (made up: {note})" if note else ""
    return _lines(found), f"{len(found):,} requests of {name}{told}"


def _lines(requests: Sequence[Request]) -> str:
    return "".join(f"{msgspec.json.encode(each).decode()}\n" for each in requests)
