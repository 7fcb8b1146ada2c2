"""`continuum top`: a running server, live: what VRAM and DRAM hold, and what that brings."""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from threading import Event
from typing import Annotated, Any

import typer
from rich.live import Live

from continuum_connector.errors import shown
from continuum_connector.tools.cli.rates import Numbers, Scrape, numbers
from continuum_connector.tools.cli.server import CommandError, Server
from continuum_connector.tools.cli.terminal import terminal
from continuum_connector.tools.cli.top_view import screen

WINDOW_S = 10.0  # the rates are means over this, or over one interval if that is longer
TIMEOUT_S = 5.0  # a server that takes longer to answer /metrics counts as gone


def top(
    url: Annotated[str, typer.Argument(help="The server's address, like http://localhost:8000.")],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="One look, which takes one interval.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per look and line.")
    ] = False,
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="If it wants one.")] = "",
) -> None:
    """Watch a running server.

    \b
    VRAM       how much of the KV cache requests, copies to DRAM and pins use
    gate       first turns held now, why earlier ones were let in (gate_wait_s)
    disk       how full it is, what is left of a day's budget (disk_path)
    prompts    where the tokens of recently admitted prompts were found
    pins       how many there are, and what ended earlier ones
    lost by    decisions that cost something: `pin never` kept VRAM for nobody,
               `free recomputed` dropped what came back
    forecasts  how far predicted chances of a return were off, and which most

    It reads /metrics, needs nothing else on the server and changes nothing there. If the server
    goes away, it waits for it. Ctrl-C ends. If the output is no terminal, --once is implied
    unless --json is given.
    """
    watch, console = Watch(Server(url, api_key, TIMEOUT_S)), terminal()
    signal.signal(signal.SIGTERM, _stop)  # so that the terminal is left clean
    if once or not (as_json or console.is_terminal):
        _look(watch)
        if not watch.trouble:
            _look(watch, interval)
        if watch.trouble or watch.shown is None:
            raise CommandError(watch.trouble)
        if as_json:
            _print(watch)
        else:
            console.print(screen(watch.url, watch.shown, ""))
    elif as_json:
        _look(watch)
        while True:
            _look(watch, interval)
            _print(watch)
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            wait_s = 0.0
            while True:
                _look(watch, wait_s)
                trouble = f"{watch.trouble}\n{watch.gone}".strip()
                live.update(screen(watch.url, watch.shown, trouble), refresh=True)
                wait_s = interval


class Watch:
    """Looks at a server again and again. `shown`: its numbers, None until it was seen twice.
    `trouble`, `gone`: why it does not answer and since when, "" if it does."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.shown: Numbers | None = None
        self.trouble = self.gone = ""
        self._server = server
        self._scrapes: deque[Scrape] = deque()
        self._gone_at: tuple[str, float] | None = None

    def look(self, now: float, wall: str) -> None:
        """Scrape once. `now`: monotonic seconds. `wall`: the time of day."""
        try:
            scrape = Scrape.parse(self._server.exposition(), now)
        except CommandError as error:
            at, since = self._gone_at = self._gone_at or (wall, now)
            self.trouble = shown(str(error))
            self.gone = f"Gone since {at}, for {now - since:.0f} s by now; asking again."
            return
        if self.trouble:  # what happened while it was gone is no rate of now
            self._scrapes.clear()
            self.trouble = self.gone = ""
            self._gone_at = None
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and self._scrapes[1].at <= now - WINDOW_S:
            self._scrapes.popleft()
        if len(self._scrapes) > 1:
            self.shown = numbers(self._scrapes[0], scrape)


def _stop(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _look(watch: Watch, after_s: float = 0.0) -> None:
    Event().wait(after_s)
    watch.look(time.monotonic(), time.strftime("%H:%M:%S"))


def _print(watch: Watch) -> None:
    """Print a look as JSON. While the server is gone, `trouble` says why and the numbers are
    null."""
    told: dict[str, Any] = {"url": watch.url, "time": time.time(), "trouble": watch.trouble}
    told |= {"interval_s": None, "served": None, "kept": None}
    if watch.shown is not None and not watch.trouble:
        told |= watch.shown
    print(json.dumps(told), flush=True)
