"""`continuum convert`: a trace in the format of the original recorder, for scripts made for it."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from continuum_connector.analysis import original
from continuum_connector.cli.reading import command, open_source, records
from continuum_connector.cli.server import CommandError


class Format(str, enum.Enum):
    """What a trace can become."""

    SCHEDULER_TIMESTAMPS = "scheduler_timestamps"


def convert(
    trace: Annotated[Path, typer.Argument(help="The file that trace_path names.")],
    to: Annotated[Format, typer.Option(help="The format.")] = Format.SCHEDULER_TIMESTAMPS,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Empty: the format's own name, here.")
    ] = None,
) -> None:
    """Write a trace as the original recorder would have: job -> time stamps, in one JSON file.

    What that format does not know is left out: loads and stores, why, what it was worth. Its
    hit_length is what was found in VRAM and in DRAM together.
    """
    with command("convert"):
        source = open_source(trace)
        jobs = original.write(records(source))
        path = out or Path(to.value)
        if not path.name:
            raise CommandError(f"--out {path} names no file; give one")
        try:
            part = path.with_name(path.name + ".tmp")
            part.write_text(json.dumps(jobs, indent=2))
            os.replace(part, path)
        except OSError as error:
            raise CommandError(f"{path} cannot be written ({error.strerror})") from None
        print(f"{len(jobs):,} programs written to {path}; {source.num_bad:,} lines skipped")
