"""The entry point that vLLM loads in every process (API server, engine core, workers).

Whatever a later vLLM has renamed, nothing here raises: that process may serve without us.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
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

    Never raises, because vLLM calls it in every process of this environment, whoever is named
    there, and does not catch what it raises. Where this vLLM lacks something, a warning says what.
    """
    _tell(set_up())


def set_up() -> list[str]:
    """Do so; what could not be done, as a clause each."""
    if no_name := _lacking(_register_name, "no config can name it"):
        return no_name  # vLLM's own error answers a config that names us, and no more is changed
    no_role = f'a config that names it needs "kv_role":"{_ROLE}"'
    no_attaching = "it does not attach to vLLM's scheduler"
    return _lacking(_give_role, no_role) + _lacking(_let_attach, no_attaching)


def _lacking(part: Callable[[], None], consequence: str) -> list[str]:
    """Do a part; [what this vLLM lacks for it, with the consequence] if that fails."""
    try:
        part()
    except Exception as error:  # whatever a later vLLM has there
        return [f"{consequence} ({type(error).__name__}: {error})"]
    return []


def _tell(lacking: list[str]) -> None:
    if lacking:
        from continuum_connector.vllm.touched import release

        logger.warning(
            "%s: %s lacks what it needs, so %s; a server that does not name it is as without it",
            *(_NAME, release(), ", and ".join(lacking)),
        )


def _register_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(_NAME, "continuum_connector.connector", _NAME)
    except ValueError as error:
        if _NAME not in str(error):  # it is registered already
            raise


def _give_role() -> None:
    """Make a config that names our connector, alone or as a MultiConnector's child, have the role
    `kv_both` if it has none. All others stay as they are, and so does vLLM's error for them.

    Whoever finds our connector by its name has loaded this plugin, so it has this default as well.
    """
    from vllm.config import KVTransferConfig

    original = KVTransferConfig.__post_init__  # all ways to make one go through it
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # other fields, or frozen ones: vLLM asks for it
            if self.kv_connector == _NAME and self.kv_role is None:
                self.kv_role = _ROLE
        original(self, *args, **kwargs)

    setattr(post_init, _MARK, original)
    KVTransferConfig.__post_init__ = post_init


def _let_attach() -> None:
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
        own = getattr(loader, "exec_module", None)
        if own is None:
            return spec

        def exec_module(module: Any) -> None:
            own(module)
            _tell(_lacking(lambda: _attach_to(module), "it does not attach to vLLM's scheduler"))

        loader.exec_module = exec_module
        return spec
