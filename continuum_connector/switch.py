"""Switch: on or off, as a file says, without a restart or a request to the server.

A thread of its own reads the file, so that no step waits for a disk and an idle engine learns of a
change. Every engine of every replica reads it: one file on a shared mount switches them all.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from continuum_connector import files
from continuum_connector.errors import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

PERIOD_S = 1.0
MEANINGS = {"on": True, "off": False}
_MAX_BYTES = 64


def read_switch(path: Path) -> str:
    """What the file says, in lower case; "on" if there is none. OSError if it cannot be read, or
    if its folder is gone: a mount that goes away switches nothing."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace").strip().lower()
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
