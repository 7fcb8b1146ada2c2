"""Checkout: what only the source tree has, the lab and the benchmarks, imported from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from continuum_connector.cli.server import CommandError


def find_checkout(module: str, name: str) -> Any:
    """Import a module of `bench` from the source tree this package lies in, or from the current
    folder. `name`: the command that needs it. CommandError says what is missing."""
    file = Path(*module.split(".")).with_suffix(".py")
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / file).is_file():
            sys.path.insert(0, str(root))
            return _import(module)
    raise CommandError(
        "this is not part of the installed package; run it in a checkout of the source: "
        f"git clone, cd, continuum {name}"
    )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"this needs the package {error.name}, which is not installed; all but vLLM comes "
            "with: pip install '.[bench]' in the checkout"
        ) from None
