"""The entry point vLLM loads in every process (API server, engine core, workers)."""

from __future__ import annotations

import sys


def register() -> None:
    """Make `ContinuumConnector` known and let it attach where a config names it. Idempotent.

    Light: nothing else of ours is imported until a server is configured with the connector, and
    in engines and workers not even what attaches, for they get their config made.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "ContinuumConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "ContinuumConnector", "continuum_connector.connector", "ContinuumConnector"
        )
    # Who makes an engine's config has loaded us from there (EngineArgs.__post_init__), before that.
    if arg_utils := sys.modules.get("vllm.engine.arg_utils"):
        from continuum_connector.vllm import attach

        attach.install(arg_utils.EngineArgs)
