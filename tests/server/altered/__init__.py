"""Ours with one thing altered, so that a test sees what it must, or that it would have seen it.

A server takes such a module by `kv_connector_module_path`. Its connector's name is ours, for the
plug-in goes by that. Where it has a fault, TEST_FAULT_FILE says when.
"""

from __future__ import annotations

from typing import Any


def transfer_config(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """What `kv_transfer_config` is for the connector of the module `name`, with these `keys`."""
    return {
        "kv_connector": "ContinuumConnector",
        "kv_connector_module_path": f"{__name__}.{name}",
        "kv_role": "kv_both",
        "kv_connector_extra_config": keys,
    }
