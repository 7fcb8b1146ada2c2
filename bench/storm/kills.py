"""kill -9 of each process of a server in turn, at work: what stays behind, beside stock's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.serve.server import VllmServer
from bench.storm.agents import Force, Storm
from bench.storm.arm import FILES, Say, serving
from bench.storm.client import Client
from bench.storm.processes import ROLES, listens, pid_of, processes, shared_memory

AT_WORK = 40  # requests done, so that there are pins, stores and loads
MOST = 10**6  # requests of that storm; it ends with the server
GRACE_S = 30.0  # for the others to notice
OUR_NAMES = ("continuum", "ckv")


@dataclass(frozen=True)
class Left:
    """What is still there: kinds of processes, files in /dev/shm, files in TMPDIR, the port."""

    processes: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    listens: bool = False

    @property
    def in_words(self) -> str:
        """For the report."""
        parts = [", ".join(f"{n} {role}" for role, n in sorted(Counter(self.processes).items()))]
        for things, word in ((self.shared_memory, "in /dev/shm"), (self.files, "in TMPDIR")):
            parts.append(f"{len(things)} {word}" if things else "")
        parts.append("the port" if self.listens else "")
        return ", ".join(part for part in parts if part) or "nothing"


@dataclass(frozen=True)
class Kill:
    """`alone`: left GRACE_S after that process had been killed; `group`: after all of them were,
    as systemd and containers do."""

    arm: str
    role: str
    alone: Left
    group: Left

    @property
    def in_words(self) -> str:
        """For the report."""
        return f"alone: {self.alone.in_words}; with its group: {self.group.in_words}"


def kill_each(arm: str, model: Path, force: Force, say: Say) -> Iterator[Kill]:
    """A fresh server for each role."""
    return (_kill(arm, role, model, force, say) for role in ROLES)


def _kill(arm: str, role: str, model: Path, force: Force, say: Say) -> Kill:
    say(f"{arm}: starting a server, to kill its {role}")
    name = f"storm-kill-{arm}-{role.split()[0]}"
    with serving(arm, model, force.policy, name) as (server, folder):
        known, segments = asyncio.run(_storm_until_killed(server, role, force.seed))

        def left() -> Left:
            return look(server, known, segments, folder)

        alone = _wait(lambda: left().processes == (), GRACE_S, left)
        os.killpg(server.pid, signal.SIGKILL) if alone.processes else None
        group = _wait(lambda: left() == Left(), 5.0, left)
        say(f"{arm}: {role} killed; alone: {alone.in_words}; with its group: {group.in_words}")
    return Kill(arm, role, alone, group)


async def _storm_until_killed(
    server: VllmServer, role: str, seed: int
) -> tuple[set[int], set[str]]:
    """Kill the process amid a storm; which processes there were, and their shared memory."""
    async with Client(server.url) as client:
        storm = Storm(client, Force(MOST, seed))
        firing = asyncio.create_task(storm.run())
        while storm.done < AT_WORK:
            await asyncio.sleep(0.1)
        known = set(processes(server.pid))
        segments = shared_memory(known)
        os.kill(pid_of(server.pid, role), signal.SIGKILL)
        await asyncio.sleep(0.5)  # those at work meet a server that is not whole
        firing.cancel()
        await asyncio.gather(firing, return_exceptions=True)
    return known, segments


def look(server: VllmServer, known: set[int], segments: set[str], folder: Path) -> Left:
    """What is left now of a server's processes, shared memory, files and port."""
    alive = {pid: role for pid, role in processes(server.pid).items() if pid in known}
    asked_for = {folder / name for name in FILES.values()}
    found = [path for path in folder.rglob("*") if not path.is_dir() and path not in asked_for]
    return Left(
        tuple(sorted(alive.values())),
        tuple(sorted(name for name in segments if Path(name).exists())),
        tuple(sorted(path.name for path in found)),
        listens(server.port),
    )


def _wait(done: Callable[[], bool], most_s: float, left: Callable[[], Left]) -> Left:
    deadline = time.monotonic() + most_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.2)
    return left()


def worse(ours: Kill, stock: Kill | None) -> list[str]:
    """What ours leaves and stock does not; without stock, what bears our name."""
    wrong = []
    for how in ("alone", "group"):
        mine: Left = getattr(ours, how)
        named = [n for n in (*mine.files, *mine.shared_memory) if _is_ours(n)]
        wrong += [f"{how}: {name} is left" for name in named]
        if stock is not None:
            wrong += [f"{how}: {more}" for more in _more(mine, getattr(stock, how))]
    return wrong


def _more(mine: Left, theirs: Left) -> list[str]:
    processes = Counter(mine.processes) - Counter(theirs.processes)
    wrong = [f"{n} {role} more than stock" for role, n in sorted(processes.items())]
    for name in ("shared_memory", "files"):
        have, base = len(getattr(mine, name)), len(getattr(theirs, name))
        if have > base:
            wrong.append(f"{have} {name.replace('_', ' ')}, stock {base}")
    if mine.listens and not theirs.listens:
        wrong.append("the port is taken")
    return wrong


def _is_ours(name: str) -> bool:
    return any(each in name.lower() for each in OUR_NAMES)
