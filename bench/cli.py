"""Command lines that teach: what happens, how to read the result, examples; and how they end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from continuum_connector.errors import ToldError
from continuum_connector.tools.cli import ending

MOST = 10**9  # of anything that a command line counts


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As always; but `--name=--` is a value, which argparse makes an empty list of."""
        found = super().parse_args(args, namespace)
        for action in self._actions:
            if action.nargs is None and getattr(found, action.dest, None) == [] != action.default:
                self.error(f"argument {action.dest}: expected one value")
        return found

    def error(self, message: str) -> NoReturn:
        """Say it, and how to learn more; status 2."""
        ending.tell(self.prog, f"{message}; `{self.prog} --help` says what it takes")
        raise SystemExit(ending.USAGE)


def teaching_parser(prog: str, what: str | None, teach: str = "") -> Parser:
    """A parser whose help is `what` it does, the options, and `teach` as it is written."""
    return Parser(
        prog=prog,
        description=what,
        epilog=teach,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def start(main: Callable[[], object], name: str) -> None:
    """Run a module's `main` as the process: `if __name__ == "__main__": start(main, ...)`."""
    ending.leave(main, name)


def regular(path: Path, option: str, error: type[ToldError]) -> None:
    """Raise `error` where the path is none of a file that ends: a folder, a pipe, a device."""
    if not path.is_file():
        raise error(f"{option}{path} is no file that can be read; name one")


def names_of(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """For an option's `type`: names with commas between, each of them `known`."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is not {what}; known: {', '.join(known)}"
                )
        return names

    return read


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """For an option's `type`: a whole number of that range."""
    return _between(int, f"whole number of {least} to {most:,}", least, most)


def real(least: float, most: float = float(MOST)) -> Callable[[str], float]:
    """For an option's `type`: a number of that range."""
    return _between(float, f"number of {least:g} to {most:g}", least, most)


def _between(kind: Callable[[str], Any], what: str, least: float, most: float) -> Any:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:  # of 5,000 digits too
            value = least - 1
        if not least <= value <= most:  # nan is in none
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return value

    return read


positive, many, any_number = whole(1), whole(0), whole(-MOST)
