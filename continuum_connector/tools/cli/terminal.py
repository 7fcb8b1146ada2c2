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
        """Run what is typed, and leave with its status."""
        given = args[0] if args else extra.get("args")
        words = [*(sys.argv[1:] if given is None else given)]
        who = extra.get("prog_name") or "continuum"
        sys.exit(ending.run(lambda: self._run(words, who), who))

    def _run(self, words: list[str], who: str) -> int:
        """The status. Not by click's `main`, for which a closed pipe is a failure."""
        context: Any = None
        try:
            with self.make_context(who, words) as context:
                if not words:
                    print(context.get_help())
                    return ending.USAGE
                self.invoke(context)
        except typer.Exit as end:
            return end.exit_code
        except _ClickError as error:
            at = getattr(error, "ctx", None)
            path = at.command_path if at else who
            said = " ".join(error.format_message().split()).rstrip(".")
            ending.tell(path, f"{said}; `{path} --help` says what it takes")
            return ending.USAGE
        except ToldError as error:
            ending.tell(f"{context.command_path} {context.invoked_subcommand}", str(error))
            return ending.FAILED
        return ending.DONE


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
