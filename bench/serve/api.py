"""One streamed answer over HTTP, tried again where that may help, with every failure told.

aiohttp and not the `openai` client: that one builds pydantic objects for every streamed token and
takes several times the CPU per turn (37 ms and 0.9, README.md), so a client
on one core would be what is measured. The API is the same: /v1/completions with token ids, or
/v1/chat/completions with messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from continuum_connector.errors import ToldError

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may pass
CONNECT_S = 30.0


class ApiError(ToldError):
    """A try that failed. `again`: it may go well next time."""

    def __init__(self, what: str, again: bool) -> None:
        super().__init__(what)
        self.again = again


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None  # of a chat
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class Answer:
    """What came back. Times are `time.perf_counter()`; 0.0 if there was no such moment."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)  # between tokens as they arrived
    tokens: list[int] = field(default_factory=list)  # ids; empty if the server does not say
    text: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.last - self.first) / (self.num_answered - 1) if self.num_answered > 1 else 0.0


@dataclass(frozen=True)
class Patience:
    """How long a try may take, and how often one more is made."""

    timeout_s: float = 600.0
    retries: int = 2
    backoff_s: float = 0.5  # before the first retry; doubled each time


class Api:
    """A server's two APIs, as an async context manager. Any number of requests at a time."""

    def __init__(
        self, url: str, api_key: str = "", patience: Patience | None = None, front: str = ""
    ) -> None:
        self.url = url
        self.front = front or url  # what is in front of the server: completions go there
        self.patience = patience or Patience()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._decode = msgspec.json.Decoder(_Chunk).decode

    async def __aenter__(self) -> Api:
        timeout = aiohttp.ClientTimeout(total=self.patience.timeout_s, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(self, *ended: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request until it is answered or out of retries; never raises for the server.

        All times count from the first try: what a retry costs is seen, not hidden.
        """
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        url = self.front + path
        payload = msgspec.json.encode({**body, **STREAM, "return_token_ids": "prompt" in body})
        sent, failures = time.perf_counter(), list[str]()
        wait_s = self.patience.backoff_s
        for left in range(self.patience.retries, -1, -1):
            answer = Answer(sent, failures=failures)
            try:
                async with self._asked("POST", url, data=payload, headers=headers) as response:
                    await self._read(response.content, answer)
                break
            except ApiError as failure:
                failures.append(str(failure))
                answer = Answer(sent, failures=failures, error=str(failure))
                if not failure.again or not left:
                    break
            await asyncio.sleep(wait_s)
            wait_s *= 2
        answer.ended = time.perf_counter()
        return answer

    async def text(self, method: str, path: str) -> str:
        """A plain request's answer; ApiError if it is none."""
        async with self._asked(method, self.url + path) as response:
            return await response.text()

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, url: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Its answer as it begins; ApiError for one that is none, and for what ends its reading."""
        assert self._session is not None
        try:
            async with self._session.request(method, url, **more) as response:
                if response.status != 200:
                    said = " ".join((await response.text()).split())[:300]
                    raise ApiError(f"HTTP {response.status}: {said}", response.status in RETRIED)
                yield response
        except asyncio.TimeoutError:
            raise ApiError(f"timeout after {self.patience.timeout_s:g} s", again=True) from None
        except (aiohttp.ClientError, OSError) as error:
            name = type(error).__name__
            raise ApiError(f"{name}: {error}" if str(error) else name, again=True) from None

    async def _read(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        """Read server-sent events to their end."""
        whole = False
        async for line in content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                whole = True
                continue
            self._note(data, answer)
        if not whole:
            raise ApiError("the answer broke off", again=True)

    def _note(self, data: bytes, answer: Answer) -> None:
        try:
            chunk = self._decode(data)
        except msgspec.MsgspecError as error:
            raise ApiError(f"not an answer of this API: {error}", again=False) from None
        if chunk.error is not None:
            raise ApiError(f"server error: {chunk.error}"[:300], again=True)
        for choice in chunk.choices:
            text = (choice.delta.content or "") if choice.delta else choice.text
            if choice.token_ids or text:
                now = time.perf_counter()
                if answer.first:
                    answer.gaps_ms.append(round(1e3 * (now - answer.last), 2))
                answer.first, answer.last = answer.first or now, now
                answer.tokens.extend(choice.token_ids or ())
                answer.text += text
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            answer.num_prompt = chunk.usage.prompt_tokens
            answer.num_answered = chunk.usage.completion_tokens
            answer.num_cached = (details.cached_tokens or 0) if details else 0


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
