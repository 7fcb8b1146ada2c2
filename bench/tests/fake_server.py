"""FakeApi: a completions API that answers at once, for what must not depend on a model.

It speaks what the load generator uses of vLLM: /v1/models, /v1/completions (streamed, with token
ids and usage), /metrics and /reset_prefix_cache. `gate` sees each request before it is answered and
may wait or say what goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

MODEL = "fake"
MAX_BODY = 2**26


@dataclass
class Trouble:
    """What a request meets instead of an answer."""

    status: int = 0  # an HTTP error; 0: the answer ends after `tokens`
    tokens: int = 0
    politely: bool = False  # the stream is closed in order, only too early


Gate = Callable[[dict[str, Any]], Awaitable["Trouble | None"]]


class FakeApi:
    """A server in this event loop; `url` is where it listens."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []  # without their prompts
        self.prompts: list[list[int]] = []
        self.sessions: list[str] = []  # the header that a router reads, or ""
        self.metrics = ""  # more lines for /metrics
        self.at_once = 0
        self.most_at_once = 0
        self.gate = gate
        self._answered = 0
        self.resets: list[str] = []  # their queries
        self.refuses = 0  # so many of them, as vLLM does while blocks are held

    async def listen(self) -> web.AppRunner:
        """Answer from now on; whoever cleans up what is returned ends it."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._reset)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        is_chat = request.path.endswith("chat/completions")
        prompt = _ids(body["messages"]) if is_chat else body.pop("prompt")
        self.requests.append(body)
        self.sessions.append(request.headers.get("X-Session-ID", ""))
        self.prompts.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            trouble = await self.gate(body) if self.gate else None
            if trouble and trouble.status:
                return web.json_response({"error": {"message": "not now"}}, status=trouble.status)
            return await self._stream(request, prompt, body, trouble)
        finally:
            self.at_once -= 1

    async def _stream(
        self,
        request: web.Request,
        prompt: list[int],
        body: dict[str, Any],
        trouble: Trouble | None,
    ) -> web.StreamResponse:
        num_tokens = body["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(trouble.tokens if trouble else num_tokens):
            token = (prompt[-1] + index) % 1000  # depends on the prompt
            if body["return_token_ids"]:
                choice: Any = {"index": 0, "text": "a", "token_ids": [token]}
            else:
                choice = {"index": 0, "delta": {"content": f" a{token}"}}
            await response.write(_event({"choices": [choice]}))
        if trouble:
            if not trouble.politely and request.transport is not None:
                request.transport.close()
            return response
        self._answered += num_tokens
        details = {"cached_tokens": len(prompt) // 2}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        usage_event = {"choices": [], "usage": {**usage, "prompt_tokens_details": details}}
        await response.write(_event(usage_event) + b"data: [DONE]\n\n")
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "root": MODEL, "max_model_len": 32768}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = f"vllm:num_requests_running {self.at_once}\n"
        lines += f"vllm:generation_tokens_total {self._answered}\n"
        return web.Response(text=lines + self.metrics)

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets.append(request.query_string)
        return web.json_response({"success": len(self.resets) > self.refuses})


def _ids(messages: list[dict[str, str]]) -> list[int]:
    """One for each word, as the tiny tokenizer has them."""
    words = (word for message in messages for word in message["content"].split())
    return [zlib.crc32(word.encode()) % 1000 for word in words]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@contextlib.contextmanager
def fake_server(gate: Gate | None = None) -> Iterator[FakeApi]:
    """A listening server in a thread of its own, for load generators that run their own event loop;
    it is gone when the block is left."""
    loop = asyncio.new_event_loop()
    server = FakeApi(gate)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(server.listen(), loop).result(10)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
