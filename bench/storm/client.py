"""One request of the storm: sent, read or hung up on, and one word for how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from bench.serve.apis import APIS

ABORTED = "hung up by us"  # the client's own doing; not a status
# vLLM's own answer to reset_running_requests while a step or a load is under way
# (v1/core/sched/scheduler.py, reset_prefix_cache), as docs/switch-off.md says
RESET_REFUSED = "reset refused by vLLM"
TIMEOUT_S = 180.0
KEPT = 20  # examples of what was not expected


@dataclass
class Ended:
    """How a request ended: a status, ABORTED, or what is wrong in words."""

    status: str
    text: str = ""  # of the answer, or of the error


@dataclass
class Tally:
    """Requests by how they ended."""

    by_status: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def add(self, ended: Ended, what: str) -> None:
        """Count one; `what` was sent."""
        self.by_status[ended.status] = self.by_status.get(ended.status, 0) + 1
        if not is_expected(ended.status) and len(self.unexpected) < KEPT:
            said = " ".join(ended.text.split())[:200]
            self.unexpected.append(f"{ended.status}: {what}: {said}")

    @property
    def num_ended(self) -> int:
        """All that were counted."""
        return sum(self.by_status.values())

    @property
    def num_unexpected(self) -> int:
        """Requests that ended as none may."""
        return sum(n for status, n in self.by_status.items() if not is_expected(status))


def is_expected(status: str) -> bool:
    """Answered, refused as the client's mistake, or not waited for."""
    return status in ("200", "400", ABORTED, RESET_REFUSED)


class Server(Protocol):
    """What the storm needs of what it is fired at."""

    async def generate(
        self, api: str, payload: bytes, headers: Mapping[str, str], abort_s: float = 0.0
    ) -> Ended:
        """Send a request to one of the four APIs; hang up after `abort_s`, unless it is 0."""
        ...

    async def reset(self, query: str) -> Ended:
        """Empty the prefix cache, as far as the server does that now."""
        ...


class Client:
    """Sends to one server; an async context manager. A connection per request: an abort ends
    one, and none is reused at the moment at which the server gives it up."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers={"Content-Type": "application/json"},
        )
        return self

    async def __aexit__(self, *ended: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self, api: str, payload: bytes, headers: Mapping[str, str], abort_s: float = 0.0
    ) -> Ended:
        """Send a request to one of the four APIs; hang up after `abort_s`, unless it is 0."""
        if not abort_s:
            return await self._ask(api, payload, headers)
        try:
            return await asyncio.wait_for(self._ask(api, payload, headers), abort_s)
        except asyncio.TimeoutError:
            return Ended(ABORTED)

    async def reset(self, query: str) -> Ended:
        """Empty the prefix cache, as far as the server does that now."""
        ended = await self._ask("", b"", {}, "/reset_prefix_cache" + query)
        refused = ended.status == "500" and "Failed to reset KV cache" in ended.text
        return Ended(RESET_REFUSED) if refused else ended

    async def get(self, path: str) -> str:
        """The body of a page; aiohttp.ClientError or OSError without one."""
        assert self._session is not None
        async with self._session.get(self._url + path) as response:
            return await response.text()

    async def _ask(
        self, api: str, payload: bytes, headers: Mapping[str, str], path: str = ""
    ) -> Ended:
        assert self._session is not None
        url = self._url + (APIS[api].path if api else path)
        try:
            async with self._session.post(url, data=payload, headers=headers) as response:
                said = await response.text()
                status = str(response.status)
                streamed = response.content_type == "text/event-stream"
        except asyncio.TimeoutError:
            return Ended(f"no answer within {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Ended("connection broken", f"{type(error).__name__}: {error}")
        if status != "200" or not api:
            return Ended(status, said)
        return read_stream(said) if streamed else read_answer(api, said)


def read_answer(api: str, said: str) -> Ended:
    """A whole answer's text."""
    try:
        return Ended("200", APIS[api].text(json.loads(said)))
    except (ValueError, LookupError, TypeError):
        return Ended("200 without an answer", said)


def read_stream(said: str) -> Ended:
    """The text of server-sent events; an error among them is not an answer, whatever the status."""
    pieces = []
    for line in said.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error") or event.get("type") == "error":
            return Ended("200 with an error in its stream", line)
        pieces.append(_piece(event))
    return Ended("200", "".join(pieces))


def _piece(event: Mapping[str, Any]) -> str:
    """What one event adds to the first choice; each API has a shape of its own."""
    for choice in event.get("choices", ())[:1]:
        delta = choice.get("delta") or {}
        return (choice.get("text") or delta.get("content") or "") * (not choice.get("index"))
    delta = event.get("delta")
    if isinstance(delta, dict):  # messages
        return str(delta.get("text") or "")
    return delta if isinstance(delta, str) and "output_text" in str(event.get("type")) else ""
