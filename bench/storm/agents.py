"""The storm itself: agents at work all at once, and what happens to a server meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.serve.apis import APIS
from bench.serve.server import SERVED_NAME
from bench.storm.garbage import BODIES, encode, short, spoil
from bench.storm.judge import ABORTED, Ended, Tally
from bench.storm.plan import Agent, Turn, draw_agent, text

if TYPE_CHECKING:
    from bench.storm.fake import FakeServer

RESETS = [  # as vLLM's scheduler is asked
    {"reset_running_requests": running, "reset_connector": connector}
    for connector in (False, True)
    for running in (False, True)
]
AT_ONCE = 24  # agents, forks not counted
NUM_RESETS, NUM_SWITCHES = 8, 4
SWITCH_S = 1.5  # the connector reads its switch once a second

Event = Callable[[], Awaitable[None]]


@dataclass
class Storm:
    """So many requests at one server. Equal ones fire the same agents, in the same order."""

    client: FakeServer
    requests: int
    seed: int = 1
    tally: Tally = field(default_factory=Tally)
    sent: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._beside: set[asyncio.Task[None]] = set()  # forks and events
        self._events = sorted(self._weather(), key=lambda event: event[0])

    async def run(self) -> None:
        """Fire until so many requests have been sent, and let the last ones end."""
        await asyncio.gather(*(self._worker() for _ in range(AT_ONCE)))
        while self._beside:
            await asyncio.gather(*self._beside)
        self._say("on")

    # --- agents -----------------------------------------------------------------------
    @property
    def _over(self) -> bool:
        return self.sent >= self.requests

    async def _worker(self) -> None:
        while not self._over:
            await self._live(draw_agent(self.seed, next(self._numbers)), [])

    async def _live(self, agent: Agent, history: list[str], parent: str = "") -> None:
        """Take the agent's turns; `history` alternates its texts and the answers."""
        rng = random.Random(f"{agent.name} lives")
        for index, turn in enumerate(agent.turns):
            await asyncio.sleep(turn.pause_s)  # an agent's tool
            if self._over:
                return
            if turn.compacts:
                history = [text(rng, 60), text(rng, 8)]
            if turn.forks:
                self._fork(rng, agent, index, history)
            history = [*history, turn.text]
            ended = await self._send(agent, index, history, parent)
            if ended.status == ABORTED and rng.random() < 0.5:
                return  # nobody comes back for it
            if ended.status == ABORTED:
                again = replace(agent, turns=(replace(turn, abort_s=0.0),))
                ended = await self._send(again, 0, history, parent)
            history = [*history, ended.text] if ended.status == "200" else history[:-1]

    def _fork(self, rng: random.Random, agent: Agent, index: int, history: Sequence[str]) -> None:
        """A second line from here on: under a name of its own, or two turns of one name at once."""
        name = f"{agent.name}-fork" if rng.random() < 0.6 else agent.name
        turns = tuple(replace(turn, forks=False) for turn in agent.turns[index : index + 2])
        child = replace(agent, name=name, turns=turns)
        self._start(self._live(child, list(history), agent.name if name != agent.name else ""))

    async def _send(self, agent: Agent, index: int, history: list[str], parent: str) -> Ended:
        turn = agent.turns[index]
        body, headers = request(agent, turn, history, last=index == len(agent.turns) - 1)
        if parent and agent.who == "continuum":
            body["kv_transfer_params"]["continuum"]["parent"] = parent
        said: list[str] = []
        payload: bytes | None = None
        if turn.spoiled:
            rng = random.Random(turn.spoiled)
            if rng.random() < 0.05:
                payload = rng.choice(BODIES)
                said = [f"the body is {short(payload)}"]
            else:
                said = spoil(rng, body, headers)
        self.sent += 1
        ended = await self.client.generate(
            agent.api, encode(body) if payload is None else payload, headers, turn.abort_s
        )
        self._count(ended, f"{agent.api} of {agent.who}, {', '.join(said) or 'nothing spoiled'}")
        return ended

    def _count(self, ended: Ended, what: str) -> None:
        self.tally.add(ended, what)
        self.done += 1
        while self._events and self._events[0][0] <= self.done:
            self._start(self._events.pop(0)[1]())

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forget it, unless it failed: `run` raises what it raised."""
        if task.cancelled() or task.exception() is None:
            self._beside.discard(task)

    # --- what happens meanwhile ---------------------------------------------------------
    def _weather(self) -> list[tuple[float, Event]]:
        """What is due after so many requests: as much in each quarter as in any other."""

        def due(times: int, part: float, event: Callable[[int], Awaitable[None]]) -> Iterator[Any]:
            for number in range(times):
                yield self.requests * (number + part) / times, partial(event, number)

        return [*due(NUM_RESETS, 0.5, self._reset), *due(NUM_SWITCHES, 0.25, self._switch)]

    async def _reset(self, number: int) -> None:
        how = RESETS[number % len(RESETS)]
        self.tally.add(await self.client.reset(**how), f"a reset, {how}")

    async def _switch(self, _number: int) -> None:
        """Off for a while, and on again; longer in a longer storm."""
        self._say("off")
        now, until = asyncio.get_running_loop().time, self.done + self.requests / 40
        began = now()
        while now() < began + SWITCH_S or (self.done < until and not self._over):
            await asyncio.sleep(0.2)
        self._say("on")

    def _say(self, word: str) -> None:
        self.client.switch.write_text(f"{word}\n")


def request(
    agent: Agent, turn: Turn, history: Sequence[str], last: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """A turn's body and headers, before anything is spoiled."""
    body, headers = agent.fields(last)
    body |= {"model": SERVED_NAME, **turn.fields, **APIS[agent.api].body(history, turn.max_tokens)}
    if turn.hints or turn.compacts:
        params = body.setdefault("kv_transfer_params", {})
        hints = {**turn.hints, **({"compaction": True} if turn.compacts else {})}
        params["continuum"] = {**params.get("continuum", {}), **hints}
    return body, headers
