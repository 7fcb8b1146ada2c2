"""Many commands, drawn: the same ones for the same seed."""

from __future__ import annotations

import contextlib
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.commands import commands
from tests.fuzz.play import Played, play
from tests.fuzz.servers import servers
from tests.fuzz.values import WIDTHS, Files, Words

HEAVY = ("vllm", "torch", "transformers")
MOST_BYTES = 8 << 30  # of address space, libraries and all
OUTPUTS = ("utf-8", "utf-8", "utf-8", "latin-1", "ascii", "full", "closed")


def many(
    folder: Path, runs: int, seed: int = 0, limit_s: float = 2.0, only: str = ""
) -> Iterator[Played]:
    """Play `runs` commands, each kind in turn; those that run on until `limit_s` get a Ctrl-C."""
    with without(HEAVY), bounded_memory(), servers() as hostile:
        rng = random.Random(seed)
        known = [each for each in commands() if only in each.title]
        files = Files(folder / "files", rng)
        home = folder / "home"
        home.mkdir()
        words = Words(rng, files, hostile.urls)
        for number in range(runs):
            command = known[number % len(known)]
            drawn = words.of(command.params)
            environ = {"COLUMNS": rng.choice(WIDTHS), "LINES": rng.choice(WIDTHS)}
            environ["TERMINAL_WIDTH"] = rng.choice(("", "x", "80"))
            environ = environ if rng.random() < 0.4 else {"NO_COLOR": "1"}
            yield play(command, drawn, home, environ, rng.choice(OUTPUTS), limit_s)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What wants more than that gets a MemoryError, and does not take the machine along."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def without(names: tuple[str, ...]) -> Iterator[None]:
    """Packages that take seconds to load are not there: the sentence for that is played too."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
