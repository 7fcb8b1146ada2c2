"""Find `bench`, the lab and the benchmarks: beside the package in the source tree, inside of it in
a wheel, where a top-level package of that name would be in everybody's way."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from continuum_connector.cli.server import CommandError

PACKAGE = Path(__file__).parents[1]


def find_bench(module: str) -> Any:
    """Import a module of `bench`. CommandError says what is missing."""
    file = Path(*module.split(".")).with_suffix(".py")
    for home in (PACKAGE.parent, PACKAGE / "_bench"):
        if (home / file).is_file():
            sys.path.insert(0, str(home))
            return _import(module)
    raise CommandError(
        f"{module} is not there, so this installation is not whole; install it again: "
        "pip install --force-reinstall --no-deps . in a clone"
    )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"this needs the package {error.name}, which is not installed; all but vLLM comes "
            "with: pip install '.[bench]' in a clone"
        ) from None
