"""The storm at the fake server: fired in virtual time, looked at all along, left alone."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from bench.serve.ledger import open_accounts, still_held
from bench.sim import census
from bench.storm import virtual
from bench.storm.agents import Force, Storm
from bench.storm.arm import IDLE_S, MAX_TTL_S, ArmRun, Look, Say
from bench.storm.fake import FakeServer

LOOKS, SCRAPES = 60, 400  # in a storm, or less:
PER_LOOK = 50  # requests at least
LOOK_S = 0.5  # virtual seconds between two glances at how far it is


def run_fake(force: Force, say: Say) -> ArmRun:
    """Fire the storm, and see what is held once the server is left alone."""
    run = ArmRun()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        server = FakeServer(force.policy, Path(folder))
        try:
            storm = Storm(server, force, server.switch, run.tally)
            virtual.run(server.clock, server.go_on, _storm(run, storm, server, say))
        finally:
            server.close()
    run.wall_s = time.monotonic() - began
    return run


async def _storm(run: ArmRun, storm: Storm, server: FakeServer, say: Say) -> None:
    watcher = asyncio.ensure_future(_watch(run, storm, server, say))
    try:
        await storm.run()
    finally:
        watcher.cancel()
    run.virtual_s = server.clock.now
    _look(run, storm.done, server)
    run.scrapes.append((storm.done, server.metrics()))
    await _let_go(run, server)
    run.scrapes.append((storm.done, server.metrics()))


async def _watch(run: ArmRun, storm: Storm, server: FakeServer, say: Say) -> None:
    """Sample as the storm goes on."""
    num, next_look, next_scrape, said = storm.force.requests, 0, 0, 0
    looks = max(1, min(LOOKS, num // PER_LOOK))
    while True:
        if storm.done * SCRAPES >= next_scrape * num:
            next_scrape += 1
            run.scrapes.append((storm.done, server.metrics()))
            size = int(census.resident_mib() * 2**20)
            run.samples.append((storm.done, size))
        if storm.done * looks >= next_look * num:
            next_look += 1
            _look(run, storm.done, server)
        if storm.done * 10 // num > said:
            said = storm.done * 10 // num
            say(f"{storm.done} requests in {server.clock.now:.0f} virtual seconds")
        await asyncio.sleep(LOOK_S)


def _look(run: ArmRun, done: int, server: FakeServer) -> None:
    engine = server.engine
    tables = census.count(engine.connector)
    objects = census.num_objects()
    run.looks.append(Look(done, objects, engine.num_steps, time.process_time(), tables))


async def _let_go(run: ArmRun, server: FakeServer) -> None:
    """Until the idle server holds nothing and its books close, or IDLE_S are over."""
    await asyncio.sleep(MAX_TTL_S)
    deadline = server.clock.now + IDLE_S
    while True:
        samples = server.metrics()
        run.open_accounts = open_accounts(samples)
        run.held = {**still_held(samples), **server.held()}
        if not (run.open_accounts or run.held) or server.clock.now > deadline:
            return
        await asyncio.sleep(LOOK_S)
