"""`continuum convert`: a trace in the format of the original recorder, for scripts made for it."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from continuum_connector import files
from continuum_connector.tools.analysis.source import write_original
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import Force, command, may_write, open_source, records


class Format(str, enum.Enum):
    """The formats that a trace can be converted to."""

    SCHEDULER_TIMESTAMPS = "scheduler_timestamps"


def convert(
    trace: Annotated[Path, typer.Argument(help="The file that trace_path names.")],
    to: Annotated[Format, typer.Option(help="The format.")] = Format.SCHEDULER_TIMESTAMPS,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Empty: the format's own name, here.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a trace as the original recorder would have: job -> time stamps, in one JSON file.

    That format leaves out loads and stores, reasons, and worth. Its hit_length is what was found
    in VRAM and DRAM together.
    """
    with command("convert"):
        source = open_source(trace)
        path = out or Path(to.value)
        if not path.name:
            raise CommandError(f"--out {path} names no file; give one")
        may_write(path, force, [source])
        jobs = write_original(records(source))
        try:
            files.put(path, json.dumps(jobs, indent=2).encode())
        except OSError as error:
            raise CommandError(f"{path} cannot be written ({error.strerror})") from None
        print(f"{len(jobs):,} programs written to {path}; {source.num_bad:,} lines skipped")
