"""What the commands share: typer and rich with other defaults, and how traces are read.

Errors are one sentence, and names are shown as they are. A long read has a progress bar, and no
file is overwritten unless the user asks for it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from continuum_connector import files
from continuum_connector.errors import shown
from continuum_connector.tools.analysis.source import Record, Source, SourceError
from continuum_connector.tools.cli import ending
from continuum_connector.tools.cli.server import CommandError

# typer has its own copy of click since 0.2x, and does not export the class.
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Commands(TyperGroup):
    """Commands that end as in ending.py, however they are called."""

    def main(self, *args: Any, **extra: Any) -> Any:
        def work() -> object:
            try:
                return main(*args, **extra | {"standalone_mode": False})
            except _ClickError as error:
                return _usage(error, who)

        main, who = super().main, extra.get("prog_name") or "continuum"
        sys.exit(ending.run(work, who))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a word, print the help as an answer and end with 2: click takes it for an
        error."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # typer would call it a failure
            raise typer.Exit(ending.DONE) from None
        except (ending.ToldError, SourceError) as error:
            ending.tell(f"{ctx.command_path} {ctx.invoked_subcommand}", str(error))
            raise typer.Exit(ending.FAILED) from None


def _usage(error: Any, who: str) -> int:
    """Print a usage error as one sentence."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else who
    said = " ".join(error.format_message().split()).rstrip(".")
    ending.tell(path, f"{said}; `{path} --help` says what it takes")
    return ending.USAGE


class Terminal(Console):
    """A console that raises BrokenPipeError for a closed pipe, as `print` does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(**options: Any) -> Console:
    """The console to print on. It turns no name into a picture (":smile:") and colours none
    unasked."""
    return Terminal(**{"highlight": False, "emoji": False, **options})


def room() -> int:
    """Characters of a line: the terminal's, or what COLUMNS says; more than enough elsewhere."""
    return shutil.get_terminal_size(fallback=(MANY, 24)).columns


def name(text: str) -> str:
    """Escape a name, or any text that is not ours, so that it is not taken for markup."""
    return escape(shown(text))


Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

MANY = 10_000  # characters of a line that nobody looks at
SHOW_FROM = 8 << 20  # bytes; less is read before anybody could see a bar


def records(source: Source) -> Iterator[Record]:
    """The source's records, with a bar on stderr for a large file."""
    console = terminal(stderr=True)
    if source.num_bytes < SHOW_FROM or not console.is_terminal:
        yield from source.records()
        return
    columns = ("{task.description}", bars.BarColumn(), bars.DownloadColumn())
    with bars.Progress(
        *columns, bars.TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(name(source.path.name), total=source.num_bytes)
        yield from source.records(lambda num: bar.advance(task, num))


def may_write(path: Path | None, forced: bool, sources: Iterable[Source]) -> None:
    """Raise CommandError, before a long read, if writing `path` would destroy something unasked."""
    if path is None or not path.exists():
        return
    if any(files.is_same(path, each) for source in sources for each in source.paths):
        raise CommandError(f"{path} is the trace itself, which would be lost; name another file")
    if not forced:
        raise CommandError(f"{path} exists and would be lost; name another file, or add --force")


def put(path: Path, data: bytes) -> None:
    """Replace the file as a whole; CommandError if that cannot be done."""
    try:
        files.put(path, data)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from None
