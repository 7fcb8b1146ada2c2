"""Our part of vLLM's kv_transfer_config: what it says where it names our connector. What the
middleware needs of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from continuum_connector.config import CONNECTOR_NAME, ID_HEADERS, header_names
from continuum_connector.errors import ConfigError


def our_part(connector: Any, extra: Any, role: Any = None) -> dict[str, Any] | None:
    """Our extra config, also inside a MultiConnector's; None if we are not named.

    `connector`, `extra`, `role`: `kv_connector`, `kv_connector_extra_config` and `kv_role` of
    vLLM's config; None for a role that was checked before. Raises ConfigError if our own extra
    config is no JSON object, our role is not `kv_both`, or we are named twice, or inside an inner
    one.
    """
    if connector == CONNECTOR_NAME:
        return _object(extra, role)
    ours = [each for each in _children(extra) if each[1].get("kv_connector") == CONNECTOR_NAME]
    if len(ours) > 1 or any(depth > 1 for depth, _ in ours):
        raise ConfigError(
            f"kv_connector_extra_config.connectors names {CONNECTOR_NAME} twice, or inside another "
            "MultiConnector, where nothing would find it; name it once, in the outer one"
        )
    if not ours:
        return None
    _, child = ours[0]
    return _object(child.get("kv_connector_extra_config"), child.get("kv_role"))


def own_headers(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """The headers that `id_headers` names, from an ASGI scope of vLLM's API server, which has its
    config, else from the environment. A config that cannot work has stopped the server before."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    transfer = getattr(getattr(client, "vllm_config", None), "kv_transfer_config", None)
    extra: Mapping[str, Any] | None = None
    try:
        if transfer is not None:
            extra = our_part(transfer.kv_connector, transfer.kv_connector_extra_config)
        return header_names((extra or {}).get("id_headers", os.environ.get(ID_HEADERS, "")))
    except ConfigError:
        return ()


def _children(extra: Any, depth: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """The connectors that a MultiConnector's extra config names, with their depth, at any depth."""
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield depth, child
            yield from _children(child.get("kv_connector_extra_config"), depth + 1)


def _object(extra: Any, role: Any) -> dict[str, Any]:
    if role not in (None, "kv_both"):  # None: vllm/plugin.py makes it kv_both
        raise ConfigError(
            f"kv_role = {str(role)[:100]!r} stops the server, because {CONNECTOR_NAME} stores KV "
            "and loads it again in the same server; leave kv_role out, or write kv_both"
        )
    if extra is None or isinstance(extra, Mapping):
        return dict(extra or {})
    raise ConfigError(
        f"kv_connector_extra_config = {extra!r} is no JSON object, so its keys cannot be read; "
        'write one without quotes around it, such as {"dram_bytes": "64GiB"}'
    )
