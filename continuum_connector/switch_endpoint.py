"""ASGI middleware: reads and writes the switch's file for an operator with a key.

    CONTINUUM_SWITCH_PATH=FILE CONTINUUM_ADMIN_KEY=SECRET vllm serve MODEL ... \
        --middleware continuum_connector.switch_endpoint.SwitchEndpoint

    PUT /continuum/switch     body `on` or `off`: writes the file
    GET /continuum/switch     what the file says: {"switch": "off"}

The state stays in the file, which every engine reads (switch.py): any number of API servers may
answer, and all agree. vLLM's --api-key guards other paths, and behind us: hence a key of our own.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from continuum_connector.config import ADMIN_KEY, SWITCH_PATH
from continuum_connector.errors import ConfigError
from continuum_connector.middleware import App, Receive, Scope, Send
from continuum_connector.switch import MEANINGS, read_switch, write_switch

PATH = "/continuum/switch"
METHODS = ("GET", "PUT")
MAX_BODY_BYTES = 64
TIMEOUT_S = 5.0  # a local file answers in less than a millisecond, a hung mount never
MIDDLEWARE = f"{__name__}.SwitchEndpoint"  # what --middleware is given


class _RequestError(Exception):
    """The request ends here: with this status, and a sentence that says what to do."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


class SwitchEndpoint:
    """Answers PATH; everything else passes untouched. Without key or path no server starts.

    One request at a time is at the file, on a daemon thread of its own. Not asyncio.to_thread: vLLM
    shuts its engine down on the loop's executor, and Python waits for its threads at exit.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._turn = asyncio.Lock()
        self._at_file: Future[str] | None = None
        self._refusal: ConfigError | None = None
        try:
            self._file, self._key = read_settings(os.environ)
        except ConfigError as error:
            self._refusal = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._refusal is not None:
            await _refuse(self._refusal, scope, send)
        elif scope["type"] == "http" and _path(scope) == PATH:
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            if scope["method"] not in METHODS:
                raise _RequestError(
                    405, "use GET to read the switch, PUT to set it", allow="GET, PUT"
                )
            wanted = await _read_body(receive) if scope["method"] == "PUT" else ""
            said = await self._ask_file(wanted)
        except _RequestError as error:
            await _send(send, error.status, {"error": str(error)}, error.headers)
        except ConnectionError:  # the client left before its body was complete
            return
        else:
            await _send(send, 200, {"switch": said}, {})

    def _check_key(self, scope: Scope) -> None:
        sent = (value for name, value in scope["headers"] if name.lower() == b"authorization")
        scheme, _, key = next(sent, b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._key):
            sentence = f"send the key of {ADMIN_KEY}: `Authorization: Bearer KEY`"
            raise _RequestError(401, sentence, **{"www-authenticate": "Bearer"})

    async def _ask_file(self, wanted: str) -> str:
        """What the file says, once it says what is wanted; 503 if it does not answer, as a mount
        that hangs, and from then on at once until it does."""
        async with self._turn:
            if self._at_file is not None and not self._at_file.done():
                raise _RequestError(
                    503,
                    f"{self._file} has not answered an earlier request yet, so "
                    f"{_cost(wanted)}; see whether its mount hangs",
                )
            self._at_file = self._begin(wanted)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(self._at_file), TIMEOUT_S)
            except asyncio.TimeoutError:
                cost = "it is not known whether it was switched" if wanted else _cost(wanted)
                raise _RequestError(
                    503,
                    f"{self._file} did not answer within {TIMEOUT_S:g} s, so {cost}; see whether "
                    "its mount hangs, then ask again",
                ) from None

    def _begin(self, wanted: str) -> Future[str]:
        answer: Future[str] = Future()
        answer.set_running_or_notify_cancel()  # who waits may give up, the call goes on

        def work() -> None:
            try:
                answer.set_result(self._use_file(wanted))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="continuum-switch-endpoint", daemon=True).start()
        return answer

    def _use_file(self, wanted: str) -> str:
        """Write what is wanted, or return what the file says."""
        try:
            if not wanted:
                return read_switch(self._file)
            write_switch(self._file, wanted)
        except OSError as error:
            raise _RequestError(
                503,
                f"{self._file} cannot be {'written' if wanted else 'read'} ({error.strerror}), so "
                f"{_cost(wanted)}; see that its folder exists and the server's user may use it, "
                "or write the file by hand",
            ) from error
        return wanted  # not read back: that may fail, and it was switched


def read_settings(environ: Mapping[str, str]) -> tuple[Path, bytes]:
    """Return the switch's file, and the key; ConfigError if one is missing."""
    path, key = environ.get(SWITCH_PATH, ""), environ.get(ADMIN_KEY, "").strip()
    if not key:
        raise ConfigError(
            f"{ADMIN_KEY} is empty, so anybody could use {PATH}, and the server stops; set a "
            f"secret, or leave out `--middleware {MIDDLEWARE}`"
        )
    if not path:
        raise ConfigError(
            f"{SWITCH_PATH} is empty, so {PATH} would have no file to write, and the server stops; "
            "name the file there, and not in kv_connector_extra_config, which the endpoint cannot "
            "see"
        )
    return Path(path), os.fsencode(key)  # as its bytes were, UTF-8 or not


async def _refuse(refusal: ConfigError, scope: Scope, send: Send) -> None:
    """Stop the server at its start. An exception alone would not: uvicorn goes on without us."""
    if scope["type"] != "lifespan":
        raise refusal
    await send({"type": "lifespan.startup.failed", "message": f"ConfigError: {refusal}"})


def _cost(wanted: str) -> str:
    return "nothing was switched" if wanted else "nobody knows what it says"


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _read_body(receive: Receive) -> str:
    """Return "on" or "off"; a longer body is not read to its end."""
    body, more = b"", True
    while more and len(body) <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    said = body.decode("utf-8", "replace").strip().lower()
    if len(body) > MAX_BODY_BYTES or said not in MEANINGS:
        raise _RequestError(
            400, "the body says neither on nor off, so nothing was switched; send one"
        )
    return said


async def _send(
    send: Send, status: int, answer: Mapping[str, str], headers: Mapping[str, str]
) -> None:
    body = json.dumps(answer).encode() + b"\n"
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
