"""ASGI middleware: a trainer with a key says that other weights serve from now on.

    CONTINUUM_ADMIN_KEY=SECRET vllm serve MODEL ... \
        --middleware continuum_connector.epoch_endpoint.EpochEndpoint

    PUT /continuum/epoch     body: nothing, or {"name": "policy-120"}

It is vLLM's own reset of its prefix cache, connector included, on every engine, so all of them have
begun the epoch when the answer comes. The name takes the place of `reset_connector=True`, which
vLLM passes on as it is. From Python, call `llm.reset_prefix_cache(reset_connector=NAME)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from continuum_connector.middleware import (
    Endpoint,
    Receive,
    RequestError,
    Scope,
    engine_of,
    read_body,
)

MAX_BODY_BYTES = 4096
MAX_NAME = 200  # characters
_BODY = 'send nothing, or {"name": "the weights\' name", "reset_running_requests": true}'


class EpochEndpoint(Endpoint):
    """A PUT is a reset of vLLM's prefix cache, connector included."""

    path = "/continuum/epoch"
    methods: ClassVar[Mapping[str, str]] = {"PUT": "begin an epoch"}

    async def answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        name, recomputes = _read(await read_body(receive, MAX_BODY_BYTES))
        client = engine_of(scope, "no epoch began")
        try:
            is_empty = await client.reset_prefix_cache(recomputes, name or True)
        except Exception as error:  # whatever an engine raises, or that it is gone
            raise RequestError(503, _not_reset(error)) from error
        return {"name": name, "vram_emptied": bool(is_empty)}


def _read(body: bytes) -> tuple[str, bool]:
    """The name, or "", and whether running turns are computed again."""
    try:
        said = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or len(body) > MAX_BODY_BYTES:
        raise RequestError(
            400, f"the body says nothing that can be read, so no epoch began; {_BODY}"
        )
    name, recomputes = said.pop("name", ""), said.pop("reset_running_requests", False)
    is_name = isinstance(name, str) and len(name) <= MAX_NAME and _is_sendable(name)
    if said or not is_name or not isinstance(recomputes, bool):
        raise RequestError(400, f"the body says something else, so no epoch began; {_BODY}")
    return name, recomputes


def _is_sendable(name: str) -> bool:
    """Whether it can reach the engine: half of a surrogate pair, which JSON takes, cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_reset(error: Exception) -> str:
    return (
        f"vLLM's reset failed ({type(error).__name__}: {error}), so on some engine the old epoch "
        "may go on; send it again before anything is asked of the new weights"
    )
