"""Command lines that teach: what happens, how to read the result, examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def teaching_parser(prog: str, what: str | None, teach: str) -> argparse.ArgumentParser:
    """A parser whose help is `what` it does, the options, and `teach` as it is written."""
    return argparse.ArgumentParser(
        prog=prog,
        description=what,
        epilog=teach,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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
