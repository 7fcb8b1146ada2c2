"""ASGI middleware: reads and writes the switch's file for an operator with a key.

    CONTINUUM_SWITCH_PATH=FILE CONTINUUM_ADMIN_KEY=SECRET vllm serve MODEL ... \
        --middleware continuum_connector.switch_endpoint.SwitchEndpoint

    PUT /continuum/switch     body `on` or `off`: writes the file
    GET /continuum/switch     what the file says: {"switch": "off"}

The state stays in the file, which every engine reads (switch.py), so any number of API servers may
answer, and all agree.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from continuum_connector.config import SWITCH_PATH
from continuum_connector.errors import ConfigError
from continuum_connector.middleware import App, Endpoint, Receive, RequestError, Scope, read_body
from continuum_connector.switch import MEANINGS, read_switch, write_switch

MAX_BODY_BYTES = 64
TIMEOUT_S = 5.0  # a local file answers in less than a millisecond, a hung mount never


class SwitchEndpoint(Endpoint):
    """GET reads the file, PUT writes it.

    One request at a time uses the file, on a daemon thread of its own. asyncio.to_thread would not
    do: vLLM shuts its engine down on the loop's executor, and Python waits at exit for the threads
    of that executor.
    """

    path = "/continuum/switch"
    methods: ClassVar[Mapping[str, str]] = {"GET": "read the switch", "PUT": "set it"}

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._file = Path(os.environ.get(SWITCH_PATH, ""))
        self._turn = asyncio.Lock()
        self._at_file: Future[str] | None = None

    @classmethod
    def read_key(cls, environ: Mapping[str, str]) -> bytes:
        key = super().read_key(environ)
        if not environ.get(SWITCH_PATH, ""):
            raise ConfigError(
                f"{SWITCH_PATH} is empty, so {cls.path} would have no file to write, and the "
                "server stops; name the file there, and not in kv_connector_extra_config, which "
                "the endpoint cannot see"
            )
        return key

    async def answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        wanted = await _read_body(receive) if scope["method"] == "PUT" else ""
        return {"switch": await self._ask_file(wanted)}

    async def _ask_file(self, wanted: str) -> str:
        """Return what the file says, once it says what is wanted. 503 if it does not answer, as on
        a mount that hangs; later requests then get 503 at once until it does."""
        async with self._turn:
            if self._at_file is not None and not self._at_file.done():
                raise RequestError(
                    503,
                    f"{self._file} has not answered an earlier request yet, so "
                    f"{_cost(wanted)}; see whether its mount hangs",
                )
            self._at_file = self._begin(wanted)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(self._at_file), TIMEOUT_S)
            except asyncio.TimeoutError:
                cost = "it is not known whether it was switched" if wanted else _cost(wanted)
                raise RequestError(
                    503,
                    f"{self._file} did not answer within {TIMEOUT_S:g} s, so {cost}; see whether "
                    "its mount hangs, then ask again",
                ) from None

    def _begin(self, wanted: str) -> Future[str]:
        answer: Future[str] = Future()
        answer.set_running_or_notify_cancel()  # the request may give up, the call goes on

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
            raise RequestError(
                503,
                f"{self._file} cannot be {'written' if wanted else 'read'} ({error.strerror}), so "
                f"{_cost(wanted)}; see that its folder exists and the server's user may use it, "
                "or write the file by hand",
            ) from error
        return wanted  # not read back: that may fail although it was switched


def _cost(wanted: str) -> str:
    return "nothing was switched" if wanted else "nobody knows what it says"


async def _read_body(receive: Receive) -> str:
    """Return "on" or "off"; a longer body is not read to its end."""
    body = await read_body(receive, MAX_BODY_BYTES)
    said = body.decode("utf-8", "replace").strip().lower()
    if len(body) > MAX_BODY_BYTES or said not in MEANINGS:
        raise RequestError(
            400, "the body says neither on nor off, so nothing was switched; send one"
        )
    return said
