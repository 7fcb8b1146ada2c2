"""A FakeApi in a thread of its own, for load generators that run their own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from bench.serve.fake_api import FakeApi, Gate


@contextlib.contextmanager
def fake_server(gate: Gate | None = None) -> Iterator[FakeApi]:
    """A listening server; it is gone when the block is left."""
    loop = asyncio.new_event_loop()
    server = FakeApi(gate)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
