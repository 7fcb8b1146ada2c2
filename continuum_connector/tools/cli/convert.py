"""`continuum convert`: our trace for scripts of the original recorder, anybody's for `continuum
simulate` and `continuum bench agents`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from continuum_connector.tools.analysis import foreign
from continuum_connector.tools.analysis.recorded import of_records
from continuum_connector.tools.analysis.source import Source, write_original
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import Force, may_write, put, records


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
    ours = source if source is not None and source.is_known else None
    to = to or (Format.SCHEDULER_TIMESTAMPS if ours else Format.REQUESTS)
    path = out or Path(to.value)
    if not path.name:
        raise CommandError(f"--out {path} names no file; give one")
    may_write(path, force, [source] if source else [])
    if to is Format.REQUESTS:
        data, said = _requests(trace, ours)
        skipped = ""
    elif ours is not None:
        jobs = write_original(records(ours))
        data, said = json.dumps(jobs, indent=2).encode(), f"{len(jobs):,} programs"
        skipped = f"; {ours.num_bad:,} lines skipped"
    else:
        raise CommandError(f"{trace} has no decisions to be told as {to.value}; leave --to out")
    put(path, data)
    print(f"{said} written to {path}{skipped}")


def _requests(trace: Path, ours: Source | None) -> tuple[bytes, str]:
    """A JSON line for each, and how many there are of what."""
    if ours is None:
        name, found, note = foreign.read(trace)
    else:
        name, found, note = "ContinuumConnector", [*of_records(records(ours))], "answers of 1 token"
        if not found:
            raise CommandError(f"{trace} has no turn that was admitted, so there is none to play")
    made_up = f" (made up: {note})" if note else ""
    return msgspec.json.Encoder().encode_lines(found), f"{len(found):,} requests of {name}{made_up}"
