"""The entry point vLLM loads in every process (API server, engine core, workers)."""

from __future__ import annotations


def register() -> None:
    """Make `ContinuumConnector` known and let it attach to the scheduler. Idempotent.

    Light: nothing of ours is imported until a server is configured with the connector.
    """
    from vllm.config import SchedulerConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from continuum_connector import attach

    if "ContinuumConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "ContinuumConnector", "continuum_connector.connector", "ContinuumConnector"
        )
    attach.install(SchedulerConfig)
