"""The entry point that vLLM loads in every process (API server, engine core, workers)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

_ARG_UTILS = "vllm.engine.arg_utils"  # the module of EngineArgs, which makes every config


def register() -> None:
    """Register `ContinuumConnector`, and let it attach if a config names it. Idempotent.

    Light: nothing else of ours is imported until a server is configured with the connector. Engines
    and workers do not even import what attaches, because they get a finished config.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "ContinuumConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "ContinuumConnector", "continuum_connector.connector", "ContinuumConnector"
        )
    # EngineArgs loads plugins, but a trainer, for instance, may load them before that module.
    if module := sys.modules.get(_ARG_UTILS):
        _attach_to(module)
    elif not any(isinstance(finder, _AttachOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AttachOnImport())


def _attach_to(arg_utils: Any) -> None:
    from continuum_connector.vllm import attach

    attach.install(arg_utils.EngineArgs)


class _AttachOnImport:
    """A finder that finds nothing itself: it attaches once vLLM imports `_ARG_UTILS`, then leaves
    `sys.meta_path`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Python's own answer, with a loader that attaches to the module after loading it."""
        if name != _ARG_UTILS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        own = loader.exec_module

        def exec_module(module: Any) -> None:
            own(module)
            _attach_to(module)

        loader.exec_module = exec_module
        return spec
