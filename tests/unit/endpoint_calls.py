"""What asks an endpoint (continuum_connector/middleware.py) as an operator's client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

Message = dict[str, Any]


@dataclass
class Called:
    """`asked`: what reached the engines; `passed`: what reached vLLM's own routes instead."""

    sent: list[Message] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    passed: int = 0

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def json(self) -> Any:
        return json.loads(self.sent[1]["body"])


def call(
    endpoint: Callable[..., Any],
    answers: Callable[..., bool],
    *,
    method: str,
    path: str,
    key: str,
    body: bytes = b"",
    failure: Exception | None = None,
    has_engine: bool = True,
    **engine: Any,
) -> Called:
    """Ask once. `answers`: what a reset of the engines returns, by its arguments; `failure`: what
    it raises instead. `engine`: more of vLLM's client of them."""
    called = Called()

    async def reset_prefix_cache(*how: Any) -> bool:
        called.asked.append(how)
        if failure is not None:
            raise failure
        return answers(*how)

    async def app(*_: Any) -> None:
        called.passed += 1

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        called.sent.append(message)

    client = SimpleNamespace(reset_prefix_cache=reset_prefix_cache, **engine)
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=client if has_engine else None)),
    }
    asyncio.run(endpoint(app)(scope, receive, send))
    return called
