"""The entry point vLLM loads in every process (API server, engine core, workers)."""

from __future__ import annotations

import sys


def register() -> None:
    """Make `ContinuumConnector` known and let it attach to the scheduler. Idempotent.

    Light: nothing of ours is imported until a server is configured with the connector.
    """
    from vllm.config import SchedulerConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from continuum_connector import attach, node

    if "ContinuumConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "ContinuumConnector", "continuum_connector.connector", "ContinuumConnector"
        )
    attach.install(SchedulerConfig)
    # Who makes an engine's config has loaded us from there (EngineArgs.__post_init__), before that.
    # Engines and workers get theirs made; to import it there would cost each a second.
    if arg_utils := sys.modules.get("vllm.engine.arg_utils"):
        node.install(arg_utils.EngineArgs)
