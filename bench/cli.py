"""Command lines that teach: what happens, how to read the result, examples."""

from __future__ import annotations

import argparse


def teaching_parser(prog: str, what: str | None, teach: str) -> argparse.ArgumentParser:
    """A parser whose help is `what` it does, the options, and `teach` as it is written."""
    return argparse.ArgumentParser(
        prog=prog,
        description=what,
        epilog=teach,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
