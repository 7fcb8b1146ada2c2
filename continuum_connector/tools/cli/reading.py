"""Reads traces for a command: with a progress bar, a sentence on failure; overwrites none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as bars

from continuum_connector import files
from continuum_connector.tools.analysis.source import Record, Source, SourceError
from continuum_connector.tools.cli import ending
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal

Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

SHOW_FROM = 8 << 20  # bytes; less is read before a bar could be seen


def records(source: Source) -> Iterator[Record]:
    """The source's records, with a bar on stderr for a large file."""
    console = terminal(stderr=True)
    if source.num_bytes < SHOW_FROM or not console.is_terminal:
        yield from source.records()
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(shown(source.path.name), total=source.num_bytes)
        yield from source.records(lambda num: bar.advance(task, num))


def open_source(path: Path) -> Source:
    """The trace at `path`; CommandError if there is none."""
    try:
        return Source(path)
    except SourceError as error:
        raise CommandError(str(error)) from None


def may_write(path: Path | None, forced: bool, sources: Iterable[Source]) -> None:
    """Before a long read: CommandError if writing `path` would destroy something unasked."""
    if path is None or not path.exists():
        return
    if any(files.is_same(path, each) for source in sources for each in source.paths):
        raise CommandError(f"{path} is the trace itself, which would be lost; name another file")
    if not forced:
        raise CommandError(f"{path} exists and would be lost; name another file, or add --force")


@contextlib.contextmanager
def command(name: str) -> Iterator[None]:
    """What goes wrong inside is told in one sentence, with status 1."""
    try:
        yield
    except (CommandError, SourceError) as error:
        ending.tell(f"continuum {name}", str(error))
        raise typer.Exit(ending.FAILED) from None
