"""The switch: on or off, as a file says, without a restart; and the ASGI middleware that reads and
writes the file for an operator with a key.

    CONTINUUM_SWITCH_PATH=FILE CONTINUUM_ADMIN_KEY=SECRET vllm serve MODEL ... \
        --middleware continuum_connector.switch_endpoint.SwitchEndpoint

    PUT /continuum/switch     body `on` or `off`: writes the file
    GET /continuum/switch     what the file says: {"switch": "off"}

Every engine of every replica reads the file: one on a shared mount switches them all, whoever wrote
it, so any number of API servers may answer, and all agree. A thread of its own reads it, so that no
step waits for a disk and an idle engine learns of a change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from continuum_connector import files
from continuum_connector.config import SWITCH_PATH
from continuum_connector.errors import ConfigError
from continuum_connector.middleware import App, Endpoint, Receive, RequestError, Scope, read_body

logger = logging.getLogger(f"vllm.{__name__}")

PERIOD_S = 1.0
TIMEOUT_S = 5.0  # a local file answers in less than a millisecond, a hung mount never
MEANINGS = {"on": True, "off": False}
MAX_BYTES = 64  # of the file, and of a request's body


def read_switch(path: Path) -> str:
    """What the file says, in lower case; "on" if there is none. OSError if it cannot be read, or
    if its folder is gone: a mount that goes away switches nothing."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace").strip().lower()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder is gone") from None
        return "on"


def write_switch(path: Path, said: str) -> None:
    """Make the file say `said`, at once and as a whole; after an OSError it is as it was."""
    files.put(path, f"{said}\n".encode())


class AlwaysOn:
    """No switch: the same interface, no thread, no file."""

    is_on = True

    def close(self) -> None:
        """Do nothing."""


class SwitchFile:
    """`is_on` is what the file said last; it may be read from any thread.

    A file that is not there means on, if its folder is there. An empty file (it is being written)
    changes nothing; nor does one that is unreadable or says something else, and the log says so
    once. `wake` makes an idle engine step.
    """

    def __init__(self, path: str, wake: Callable[[], None] | None) -> None:
        self.is_on = True
        self._path = Path(path)
        self._wake = wake
        self._complaint = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="continuum-switch", daemon=True)
        self.look()  # a server may start switched off

    def start(self) -> None:
        """Read the file every PERIOD_S from now on."""
        self._thread.start()

    def look(self) -> None:
        """Read the file now."""
        try:
            said = read_switch(self._path)
        except OSError as error:
            self._complain(f"cannot be read ({error.strerror})")
            return
        if said not in MEANINGS:
            if said:
                self._complain(f"says {said!r}; write on or off")
            return
        self._complaint = ""
        if MEANINGS[said] is not self.is_on:
            self.is_on = MEANINGS[said]
            if self._wake is not None:
                self._wake()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._look_again()

    def _look_again(self) -> None:
        """Look, and survive any error: this is the top of the only thread that reads the file."""
        try:
            self.look()
        except Exception as error:
            self._complain(f"failed ({error!r})")

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            state = "on" if self.is_on else "off"
            logger.warning(
                "switch_path = %s %s; ContinuumConnector stays %s", self._path, what, state
            )
        self._complaint = what


def open_switch(path: str, wake: Callable[[], None] | None) -> SwitchFile | AlwaysOn:
    """Return the switch that `switch_path` asks for; ConfigError if it could never work."""
    if not path:
        return AlwaysOn()
    check(path)
    switch = SwitchFile(path, wake)
    switch.start()
    return switch


def check(path: str) -> None:
    """ConfigError if the file at `path` could never be written."""
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(
            f"switch_path = {path!r} is in no directory that exists, so the connector could never "
            "be switched off; make the directory, or leave switch_path empty"
        )


# --- the endpoint ---------------------------------------------------------------------------
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
    body = await read_body(receive, MAX_BYTES)
    said = body.decode("utf-8", "replace").strip().lower()
    if len(body) > MAX_BYTES or said not in MEANINGS:
        raise RequestError(
            400, "the body says neither on nor off, so nothing was switched; send one"
        )
    return said
