"""The storm at the fake server: fired in virtual time, looked at all along, left alone, judged."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.serve.ledger import open_accounts, still_held
from bench.sim import census
from bench.storm import virtual
from bench.storm.agents import Force, Storm
from bench.storm.arm import IDLE_S, MAX_TTL_S, OURS, ArmRun, Sample, Say
from bench.storm.fake import FakeServer
from bench.storm.judge import ENOUGH, Finding, Verdict, books, found, growth_of
from bench.storm.processes import ENGINE

LOOKS, SCRAPES = 60, 400  # in a storm, or less:
PER_LOOK = 50  # requests at least
LOOK_S = 0.5  # virtual seconds between two glances at how far it is
FULL = 20_000  # requests by which the largest table is at its bound
MOST_GROWTH = 0.05  # of the process's level, over the whole storm


@dataclass(frozen=True)
class Look:
    """What the process holds after so many requests. `tables`: items by container of ours."""

    done: int
    num_objects: int
    num_steps: int
    cpu_s: float
    tables: dict[str, int]


@dataclass
class FakeRun(ArmRun):
    """What the fake server did in the storm."""

    looks: list[Look] = field(default_factory=list)
    virtual_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        looks = [asdict(look) for look in self.looks]
        return {**super().as_json(), "looks": looks, "virtual_s": self.virtual_s}


def run_fake(force: Force, say: Say) -> FakeRun:
    """Fire the storm, and see what is held once the server is left alone."""
    run = FakeRun(OURS)
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


async def _storm(run: FakeRun, storm: Storm, server: FakeServer, say: Say) -> None:
    watcher = asyncio.ensure_future(_watch(run, storm, server, say))
    try:
        await storm.run()
    finally:
        watcher.cancel()
    run.virtual_s, run.answers, run.alive = server.clock.now, storm.answers, True
    _look(run, storm.done, server)
    run.scrapes.append((storm.done, server.metrics()))
    await _let_go(run, server)
    run.scrapes.append((storm.done, server.metrics()))


async def _watch(run: FakeRun, storm: Storm, server: FakeServer, say: Say) -> None:
    """Sample as the storm goes on."""
    num, next_look, next_scrape, said = storm.force.requests, 0, 0, 0
    looks = max(1, min(LOOKS, num // PER_LOOK))
    while True:
        if storm.done * SCRAPES >= next_scrape * num:
            next_scrape += 1
            run.scrapes.append((storm.done, server.metrics()))
            size = int(census.resident_mib() * 2**20)
            run.samples.append(Sample(server.clock.now, storm.done, {ENGINE: size}))
        if storm.done * looks >= next_look * num:
            next_look += 1
            _look(run, storm.done, server)
        if storm.done * 10 // num > said:
            said = storm.done * 10 // num
            say(f"{storm.done} requests in {server.clock.now:.0f} virtual seconds")
        await asyncio.sleep(LOOK_S)


def _look(run: FakeRun, done: int, server: FakeServer) -> None:
    engine = server.engine
    tables = census.count(engine.connector)
    objects = census.num_objects()
    run.looks.append(Look(done, objects, engine.num_steps, time.process_time(), tables))


async def _let_go(run: FakeRun, server: FakeServer) -> None:
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


# --- what must be true --------------------------------------------------------------------
def judge_fake(run: FakeRun) -> list[Finding]:
    """Every finding, in the order in which the report prints them."""
    return [*books(run), _containers(run), _memory(run)]


def _containers(run: FakeRun) -> Finding:
    if run.looks[-1].done < FULL:
        text = f"below {FULL:,} requests tables still fill"
        return Finding("containers", Verdict.UNSEEN, text)
    grown, num = grown_of(run.looks), len(run.looks[-1].tables)
    named = (f"{name}: {a:,.0f}, then {b:,.0f}" for name, (a, b) in sorted(grown.items()))
    text = "; ".join([f"{len(grown)} of {num} are larger at the end than in the middle", *named])
    return found("containers", not grown, text)


def grown_of(looks: Sequence[Look]) -> dict[str, tuple[float, float]]:
    """What is larger in the last quarter than in the one around the middle: medians of both, for
    what runs and waits differs from look to look."""
    last = looks[-1].done
    middle, late = (
        _medians([look for look in looks if low * last <= look.done <= high * last])
        for low, high in ((3 / 8, 5 / 8), (3 / 4, 1.0))
    )
    return census.larger(middle, late)


def _medians(looks: Sequence[Look]) -> dict[str, float]:
    names = {name for look in looks for name in look.tables}
    found = {name: statistics.median(look.tables.get(name, 0) for look in looks) for name in names}
    return {**found, "Python objects": statistics.median(look.num_objects for look in looks)}


def _memory(run: FakeRun) -> Finding:
    """There is no stock to compare with: the storm's own client is in this process, too."""
    grown = growth_of(run, ENGINE)
    share = grown.slope * grown.requests / 1000 / grown.level
    text = (
        f"{grown.slope / 2**20:+.3f} MiB per 1,000 requests, {share:+.1%} of "
        f"{grown.level / 2**20:.0f} MiB over {grown.requests:,}"
    )
    if grown.requests < ENOUGH:
        return Finding("memory", Verdict.UNSEEN, text)
    return found("memory", share <= MOST_GROWTH, text)
