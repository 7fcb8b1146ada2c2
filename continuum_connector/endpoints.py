"""Endpoint: an ASGI middleware that answers one path, for an operator with a key.

It has a key of its own, because vLLM's --api-key guards other paths and is checked only after us.
"""

from __future__ import annotations

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from continuum_connector.config import ADMIN_KEY
from continuum_connector.errors import ConfigError
from continuum_connector.middleware import App, Receive, Scope, Send


class RequestError(Exception):
    """The request ends here: with this status, and a sentence that says what to do."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


def engine_of(scope: Scope, so: str) -> Any:
    """vLLM's engine client, where its API server keeps it (v1/engine/async_llm.py); without one a
    RequestError with what follows (`so`)."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if client is None:
        raise RequestError(503, f"no engine is behind this server, so {so}")
    return client


class Endpoint(ABC):
    """Answers `path` for clients that have the key; everything else passes untouched. No server
    starts without what `read_key` needs."""

    path: ClassVar[str]
    methods: ClassVar[Mapping[str, str]]  # what each is for

    def __init__(self, app: App) -> None:
        self.app = app
        self._refusal: ConfigError | None = None
        try:
            self._key = self.read_key(os.environ)
        except ConfigError as error:
            self._refusal = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._refusal is not None:
            await _refuse(self._refusal, scope, send)
        elif scope["type"] == "http" and self.serves(path_of(scope)):
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @classmethod
    def name(cls) -> str:
        """What --middleware is given."""
        return f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def read_key(cls, environ: Mapping[str, str]) -> bytes:
        """The operator's key with its bytes unchanged, UTF-8 or not; ConfigError if there is none,
        or if something else is missing."""
        key = environ.get(ADMIN_KEY, "").strip()
        if not key:
            raise ConfigError(
                f"{ADMIN_KEY} is empty, so anybody could use {cls.path}, and the server stops; set "
                f"a secret, or leave out `--middleware {cls.name()}`"
            )
        return os.fsencode(key)

    def serves(self, path: str) -> bool:
        return path == self.path

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        """Do as the request says, and return what is sent back as JSON. RequestError says why not;
        ConnectionError: the client left before its body was complete."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            if scope["method"] not in self.methods:
                what = ", ".join(f"{method} to {aim}" for method, aim in self.methods.items())
                raise RequestError(405, f"use {what}", allow=", ".join(self.methods))
            answer = await self.answer(scope, receive)
        except RequestError as error:
            await _send_json(send, error.status, {"error": str(error)}, error.headers)
        except ConnectionError:
            return
        else:
            await _send_json(send, 200, answer, {})

    def _check_key(self, scope: Scope) -> None:
        sent = (value for name, value in scope["headers"] if name.lower() == b"authorization")
        scheme, _, said = next(sent, b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(said.strip(), self._key):
            sentence = f"send the key of {ADMIN_KEY}: `Authorization: Bearer KEY`"
            raise RequestError(401, sentence, **{"www-authenticate": "Bearer"})


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The body, or the beginning of a longer one; ConnectionError if the client left."""
    body, more = b"", True
    while more and len(body) <= max_bytes:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _refuse(refusal: ConfigError, scope: Scope, send: Send) -> None:
    """Stop the server at its start. An exception alone would not: uvicorn goes on without us."""
    if scope["type"] != "lifespan":
        raise refusal
    await send({"type": "lifespan.startup.failed", "message": f"ConfigError: {refusal}"})


async def _send_json(
    send: Send, status: int, answer: Mapping[str, Any], headers: Mapping[str, str]
) -> None:
    body = json.dumps(answer).encode() + b"\n"
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
