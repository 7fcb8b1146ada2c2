"""measure: one load on one server, from the warm-up to the last line in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.serve import results
from bench.serve.api import Api, ApiError, Patience
from bench.serve.load import Client, Load, warm_up
from bench.serve.record import RunFolder
from bench.serve.results import State
from bench.serve.token_ids import LOW

RESETS = 60  # stores of the last load may take seconds


@dataclass(frozen=True)
class Manner:
    """How a load is put on a server, whatever the load is."""

    patience: Patience = field(default_factory=Patience)
    warm_up: int = 4  # programs whose first turn is sent before anything counts
    settle_s: float = 0.3  # before the last reading: counters travel with steps
    reset: bool = False  # empty the server's caches after the warm-up
    api_key: str = ""
    client: Client = field(default_factory=Client)
    front: str = ""  # the address of what is in front of the server, if anything is


def measure(url: str, load: Load, folder: RunFolder, manner: Manner) -> State:
    """Put the load on the server and close the folder; Ctrl-C keeps what was measured.

    Raises ApiError when the server cannot be reached or refuses the warm-up; the folder is
    then closed too, and says so.
    """
    raise_file_limit()
    try:
        state = asyncio.run(_measure(url, load, folder, manner))
    except ApiError as error:
        folder.close("cannot_run", str(error))
        raise
    folder.close(state, f"{folder.num_failed} turns failed" if folder.num_failed else "")
    return state


async def _measure(url: str, load: Load, folder: RunFolder, manner: Manner) -> State:
    async with Api(url, manner.api_key, manner.patience, manner.front) as api:
        with _stopping(asyncio.current_task()) as was_stopped:
            with contextlib.suppress(asyncio.CancelledError):
                await _prepare(api, load, folder, manner)
                await manner.client.drive(api, load, folder)
            stopped = was_stopped()
        with contextlib.suppress(ApiError):
            await asyncio.sleep(manner.settle_s)
            await _one_more_step(api, load)
            folder.metrics(results.AFTER, await api.text("GET", "/metrics"))
    return "interrupted" if stopped else "done"


async def _prepare(api: Api, load: Load, folder: RunFolder, manner: Manner) -> None:
    await warm_up(api, load, manner.warm_up)
    if manner.reset:
        await _forget(api, manner.patience)
    with contextlib.suppress(ApiError):  # not every server has metrics
        folder.metrics(results.BEFORE, await api.text("GET", "/metrics"))


async def _forget(api: Api, patience: Patience) -> None:
    """Empty the server's caches, a connector's too; ApiError if something keeps them.

    vLLM refuses while blocks are held, as by stores under way, and connectors keep what they have
    unless `reset_external` is said (entrypoints/serve/dev/cache/api_router.py).
    """
    for _ in range(RESETS):
        if "false" not in await api.text("POST", "/reset_prefix_cache?reset_external=true"):
            return
        await asyncio.sleep(patience.backoff_s)
    raise ApiError("the server did not empty its caches: something holds blocks", again=False)


async def _one_more_step(api: Api, load: Load) -> None:
    """A connector's last counters come with it."""
    body = {"model": load.model, "prompt": [LOW], "max_tokens": 1, "temperature": 0.0}
    await api.complete(body)


@contextlib.contextmanager
def _stopping(task: asyncio.Task[None] | None) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C cancels the task and is remembered; the second is an ordinary one."""
    loop, asked = asyncio.get_running_loop(), []

    def stop() -> None:
        asked.append(True)
        loop.remove_signal_handler(signal.SIGINT)
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield lambda: bool(asked)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def raise_file_limit() -> None:
    """As many open connections as this process may have: a program at work holds one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
