"""What `continuum check` and `continuum size` share: from what is pasted to a plan."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from continuum_connector.tools.checks import paste
from continuum_connector.tools.checks.paste import NoServerError, Pasted
from continuum_connector.tools.checks.plan import DEFAULT_TRANSFER, Plan, read_plan
from continuum_connector.tools.cli.terminal import terminal


def planned(command: Sequence[str], model: str) -> tuple[Plan, dict[str, str]]:
    """The plan and the environment of the first server that is pasted, or of one of `model`, which
    counts more than what is pasted. Raises UsageError."""
    given = ["--model", model] if model else []
    if not command:
        plan = read_plan(given, os.environ)
        return replace(plan, words=tuple(given)), dict(os.environ)
    try:
        server, *others = read_pasted(command)
    except NoServerError as why:
        return replace(read_plan(given, os.environ), why_no_server=str(why)), dict(os.environ)
    environ = {**os.environ, **server.environ}
    words = server.words
    if given and words and not words[0].startswith("-"):
        words = words[1:]  # to vLLM, a model without --model counts more
    plan = read_plan([*words, *given], environ)
    is_stock = plan.transfer is DEFAULT_TRANSFER and not plan.options_file
    plan = replace(plan, words=(*words, *given), is_stock=is_stock, is_inside=server.is_inside)
    names = tuple(each.name or "another" for each in others)
    return replace(plan, unknown=tuple(server.unknown), others=names), environ


def read_pasted(command: Sequence[str]) -> list[Pasted]:
    """The servers that these words start; one word alone is a whole text, a file, or `-`. Raises
    NoServerError."""
    if len(command) > 1:
        return paste.of_words(command)
    word = command[0]
    try:
        if word == "-":
            return paste.read(sys.stdin.read(paste.MAX_BYTES))
        if not any(map(str.isspace, word)) and Path(word).is_file():
            with Path(word).open(errors="replace") as file:
                return paste.read(file.read(paste.MAX_BYTES))
    except OSError as why:
        raise NoServerError(f"{word} cannot be read ({why.strerror})") from None
    return paste.read(word)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Say on a terminal what takes so long."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("looking at vLLM, driver and machine"):
        yield
