"""ContinuumConnector: keeps an agent's KV cache where its next turn will need it."""

from __future__ import annotations

from typing import Any

__all__ = ["ContinuumConnector", "scheduler_cls"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `import continuum_connector` stays light."""
    if name == "ContinuumConnector":
        from continuum_connector.connector import ContinuumConnector

        return ContinuumConnector
    if name == "scheduler_cls":
        from continuum_connector.vllm.attach import scheduler_cls

        return scheduler_cls
    if name == "__version__":  # only pyproject.toml says it
        from importlib.metadata import version

        return version("continuum-connector")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
