"""The entry point that vLLM loads in every process (API server, engine core, workers)."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

_NAME = "ContinuumConnector"
_ROLE = "kv_both"  # a server loads what it stored itself
_MARK = "_continuum_wraps"
_ARG_UTILS = "vllm.engine.arg_utils"  # the module of EngineArgs, which makes every config


def register() -> None:
    """Register `ContinuumConnector`, give its name a `kv_role`, and let it attach if a config names
    it. Idempotent.

    Light: nothing else of ours is imported until a server is configured with the connector. Engines
    and workers do not even import what attaches, because they get a finished config.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "continuum_connector.connector", _NAME)
    _give_role()
    # EngineArgs loads plugins, but a trainer, for instance, may load them before that module.
    if module := sys.modules.get(_ARG_UTILS):
        _attach_to(module)
    elif not any(isinstance(finder, _AttachOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AttachOnImport())


def _give_role() -> None:
    """Make a config that names our connector, alone or as a MultiConnector's child, have the role
    `kv_both` if it has none. All others stay as they are, and so does vLLM's error for them.

    Whoever finds our connector by its name has loaded this plugin, so it has this default as well.
    """
    try:
        from vllm.config import KVTransferConfig

        original = KVTransferConfig.__post_init__  # all ways to make one go through it
    except (ImportError, AttributeError) as error:
        # vLLM asks for a kv_role then, so nothing starts otherwise than it was written.
        logger.debug("kv_role has no default: %s", error)
        return
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(AttributeError):  # other fields, or frozen ones: vLLM asks for it
            if self.kv_connector == _NAME and self.kv_role is None:
                self.kv_role = _ROLE
        original(self, *args, **kwargs)

    setattr(post_init, _MARK, original)
    KVTransferConfig.__post_init__ = post_init


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
