"""What the commands share: typer and rich with other defaults. Errors are one sentence, and names
are shown as they are."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from typer.core import TyperGroup

from continuum_connector.errors import ToldError, shown
from continuum_connector.tools.cli import ending

# typer has its own copy of click since 0.2x, and does not export the class.
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


# Of commands that take what somebody pastes.
Command = Annotated[
    list[str] | None,
    typer.Argument(help="What starts the server, pasted after two dashes; or a file; or -."),
]


class Commands(TyperGroup):
    """Commands that end as in ending.py, however they are called."""

    def main(self, *args: Any, **extra: Any) -> Any:
        def work() -> object:
            try:
                return main(*args, **extra | {"standalone_mode": False})
            except _ClickError as error:  # one sentence
                context = getattr(error, "ctx", None)
                path = context.command_path if context is not None else who
                said = " ".join(error.format_message().split()).rstrip(".")
                ending.tell(path, f"{said}; `{path} --help` says what it takes")
                return ending.USAGE

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
        except ToldError as error:
            ending.tell(f"{ctx.command_path} {ctx.invoked_subcommand}", str(error))
            raise typer.Exit(ending.FAILED) from None


class Terminal(Console):
    """A console that raises BrokenPipeError for a closed pipe, as `print` does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(**options: Any) -> Console:
    """The console to print on. It turns no name into a picture (":smile:") and colours none
    unasked."""
    return Terminal(**{"highlight": False, "emoji": False, **options})


def looking() -> Status:
    """Says on a terminal what takes so long."""
    return terminal(stderr=True).status("looking at vLLM, driver and machine")


def name(text: str) -> str:
    """Escape a name, or any text that is not ours, so that it is not taken for markup."""
    return escape(shown(text))
