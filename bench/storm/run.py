"""The storm at the fake server: fired in virtual time, looked at all along, left alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.serve.metrics import open_accounts, still_held
from bench.storm import census, virtual
from bench.storm.agents import Storm
from bench.storm.fake import MAX_TTL_S, FakeServer
from bench.storm.judge import Look, Run

LOOKS = 60  # in a storm, or fewer:
PER_LOOK = 50  # requests at least
GLANCE_S = 0.5  # virtual seconds between two glances at how far it is
IDLE_S = 60.0  # to let everything go once max_ttl_s is over

Say = Callable[[str], None]


def fire(requests: int, seed: int, say: Say) -> Run:
    """Fire the storm, and see what is held once the server is left alone."""
    run = Run()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        server = FakeServer(Path(folder))
        try:
            storm = Storm(server, requests, seed, run.tally)
            virtual.run(server.clock, server.go_on, _storm(run, storm, server, say))
        finally:
            server.close()
    return run


async def _storm(run: Run, storm: Storm, server: FakeServer, say: Say) -> None:
    watcher = asyncio.ensure_future(_watch(run, storm, server, say))
    try:
        await storm.run()
    finally:
        watcher.cancel()
    run.virtual_s = server.clock.now
    _look(run, storm.done, server)
    await _let_go(run, server)


async def _watch(run: Run, storm: Storm, server: FakeServer, say: Say) -> None:
    """Look as the storm goes on."""
    num, next_look, said = storm.requests, 0, 0
    looks = max(1, min(LOOKS, num // PER_LOOK))
    while True:
        if storm.done * looks >= next_look * num:
            next_look += 1
            _look(run, storm.done, server)
        if storm.done * 10 // num > said:
            said = storm.done * 10 // num
            say(f"{storm.done} requests in {server.clock.now:.0f} virtual seconds")
        await asyncio.sleep(GLANCE_S)


def _look(run: Run, done: int, server: FakeServer) -> None:
    engine = server.engine
    tables, objects = census.count(engine.connector), census.num_objects()
    size = census.resident_bytes()
    run.looks.append(Look(done, engine.num_steps, size, objects, server.metrics(), tables))


async def _let_go(run: Run, server: FakeServer) -> None:
    """Until the idle server holds nothing and its books close, or IDLE_S are over."""
    await asyncio.sleep(MAX_TTL_S)
    deadline = server.clock.now + IDLE_S
    while True:
        samples = server.metrics()
        run.open_accounts = open_accounts(samples)
        run.held = {**still_held(samples), **server.held()}
        if not (run.open_accounts or run.held) or server.clock.now > deadline:
            return
        await asyncio.sleep(GLANCE_S)
