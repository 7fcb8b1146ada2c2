"""Changes typer's and rich's defaults: errors in one sentence, names as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from continuum_connector.errors import shown
from continuum_connector.tools.cli import ending

# typer brings a click of its own since 0.2x, and does not name the class.
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Commands(TyperGroup):
    """Commands that end as `ending` says, however they are called."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        def work() -> object:
            try:
                return main(args, prog_name, complete_var, standalone_mode=False, **extra)
            except _ClickError as error:
                return _usage(error, who)

        main, who = super().main, prog_name or "continuum"
        sys.exit(ending.run(work, who))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # typer would call it a failure
            raise typer.Exit(ending.DONE) from None


def _usage(error: Any, who: str) -> int:
    """A usage error as a sentence; help that was meant, by no word at all, as help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else who
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ending.USAGE
    said = " ".join(error.format_message().split()).rstrip(".")
    ending.tell(path, f"{said}; `{path} --help` says what it takes")
    return ending.USAGE


class Terminal(Console):
    """A console that says of a closed pipe what `print` says: BrokenPipeError."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(**options: Any) -> Console:
    """Where to print. No name becomes a picture (":smile:"), none is coloured unasked."""
    return Terminal(**{"highlight": False, "emoji": False, **options})


def name(text: str) -> str:
    """A name, or any text that is not ours, as it may stand among markup."""
    return escape(shown(text))
