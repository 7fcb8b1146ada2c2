"""The load: every program a coroutine that sends, reads, runs its tool, and sends again.

One core drives thousands of them. What the client itself is late with is measured (`lateness` of
each program, `max_lag_s` of the event loop), so that a client at its limit is seen.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.plans import ProgramPlan
from bench.serve.api import Answer, Api, ApiError
from bench.serve.arrivals import Arrivals
from bench.serve.programs import Source
from bench.serve.record import RunFolder
from bench.serve.results import Loaded, Program, Turn
from bench.serve.router import HEADER
from bench.serve.token_ids import Tokens
from continuum_connector.errors import ToldError

LAG_EVERY_S = 0.1
WARM_UP_SEED = 1_000_003  # added to the seed: token ids that no measured program has


@dataclass(frozen=True)
class Load:
    """Which programs, when, and what goes into each request."""

    workload: Source
    arrivals: Arrivals
    tokens: Tokens
    model: str
    duration_s: float = 45.0  # a closed loop begins no program after that
    programs: int = 0  # at most; 0: no bound but time
    hints: bool = True  # program name and last turn, in `vllm_xargs`
    priority: bool = False  # the program's number as vLLM's request priority
    routed: bool = False  # its name in the header that vLLM's router reads

    def plan(self, number: int) -> ProgramPlan:
        """Program `number`."""
        return self.workload.program(number, self.tokens.seed)

    def most_programs(self) -> int | None:
        """How many there can be; None: only time ends a closed loop."""
        bounds = [self.programs or None, self.workload.size, len(self.arrivals.times_s) or None]
        known = [bound for bound in bounds if bound is not None]
        return min(known) if known else None

    def num_turns(self) -> int:
        """Of all programs; 0 if only time ends them."""
        return sum(len(self.plan(number).turns) for number in range(self.most_programs() or 0))


class Driver:
    """Runs a load against a server and writes down what happens."""

    def __init__(self, api: Api, load: Load, folder: RunFolder | Loaded) -> None:
        self._api = api
        self._load = load
        self._folder = folder
        self._began = 0.0

    async def run(self) -> None:
        """Return when the last program has ended; cancel it to stop early."""
        self._began = time.perf_counter()
        lag = asyncio.create_task(self._watch_lag())
        try:
            if self._load.arrivals.open_loop:
                await self._open_loop()
            elif self._load.arrivals.at_once:
                await self._closed_loop()
            else:
                await self._turn_by_turn()
        finally:
            lag.cancel()
            self._folder.run.wall_s = self._now()

    async def _open_loop(self) -> None:
        times = self._load.arrivals.times_s[: self._load.most_programs()]
        await asyncio.gather(*(self._program(number, at) for number, at in enumerate(times)))

    async def _closed_loop(self) -> None:
        most = self._load.most_programs()
        numbers = iter(range(most if most is not None else 2**31))

        async def worker() -> None:
            for number in numbers:
                if self._now() >= self._load.duration_s:
                    return
                await self._program(number, self._now())

        at_once = min(self._load.arrivals.at_once, most or 2**31)
        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def _turn_by_turn(self) -> None:
        runs = [_Run(self, number, 0.0) for number in range(self._load.most_programs() or 1)]
        for index in range(max(len(run.plan.turns) for run in runs)):
            for run in runs:
                if not index:
                    run.arrival_s = self._now()
                if not run.ended:
                    await run.turn(index)

    async def _program(self, number: int, arrival_s: float) -> None:
        await asyncio.sleep(self._began + arrival_s - time.perf_counter())
        run = _Run(self, number, arrival_s)
        for index, turn in enumerate(run.plan.turns):
            await asyncio.sleep(turn.gap_s)
            await run.turn(index)
            if run.ended:
                break

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _watch_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            late = time.perf_counter() - before - LAG_EVERY_S
            self._folder.run.max_lag_s = max(self._folder.run.max_lag_s, late)


class _Run:
    """One program on its way: its context grows by what it sends and what is answered."""

    def __init__(self, driver: Driver, number: int, arrival_s: float) -> None:
        self._driver = driver
        self._load = driver._load
        self._number = number
        self.plan = self._load.plan(number)
        self.arrival_s = arrival_s
        self.ended = False
        self._start_s = 0.0
        self._context: list[int] = []
        self._messages: list[dict[str, str]] = []  # instead, where the plan has words
        self._done = 0
        self._tool_s = 0.0

    async def turn(self, index: int) -> None:
        """Send turn `index`, write down what came of it, and end with the last or a failed one."""
        turn = self.plan.turns[index]
        self._tool_s += turn.gap_s
        self._ask(index)
        start_s = self._driver._now()
        if not index:
            self._start_s = start_s
        headers = {HEADER: self.plan.name} if self._load.routed else None
        answer = await self._driver._api.complete(self._body(index), headers)
        self._write(index, start_s, answer)
        self._answered(index, answer)
        if answer.error or index == len(self.plan.turns) - 1:
            self._end(answer.error)

    def _ask(self, index: int) -> None:
        """Add what is new in the prompt."""
        if text := self.plan.turns[index].text:
            self._messages.append({"role": "tool" if index else "user", "content": text})
        else:
            del self._context[self.plan.num_kept(index) :]
            self._context += self._load.tokens.of_turn(self.plan, index)

    def _answered(self, index: int, answer: Answer) -> None:
        if self._messages:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            tokens = answer.tokens or self._load.tokens.instead_of_answer(self.plan, index)
            self._context += tokens

    def _end(self, error: str) -> None:
        self.ended = True
        now = self._driver._now()
        self._driver._folder.program(
            Program(
                program=self.plan.name,
                arrival_s=self.arrival_s,
                start_s=self._start_s,
                jct_s=now - self.arrival_s,
                turns=self._done,
                planned_turns=len(self.plan.turns),
                tool_s=self._tool_s,
                error=error,
            )
        )

    def _body(self, index: int) -> dict[str, Any]:
        """The request: exactly that many tokens, the likeliest ones."""
        load, num_answer = self._load, self.plan.turns[index].answer.length
        body: dict[str, Any] = {"model": load.model, "max_tokens": num_answer, "temperature": 0.0}
        if self._messages:  # as an agent framework asks
            body["messages"] = self._messages
        else:
            body |= {"prompt": self._context, "min_tokens": num_answer, "ignore_eos": True}
        if load.hints:
            last = index == len(self.plan.turns) - 1
            body["vllm_xargs"] = {"job_id": self.plan.name, "is_last_step": int(last)}
        if load.priority:
            body["priority"] = self._number
        return body

    def _write(self, index: int, start_s: float, answer: Answer) -> None:
        wanted = self.plan.turns[index].answer.length
        if not answer.error and answer.num_answered != wanted:
            answer.error = f"{answer.num_answered} of {wanted} tokens answered"
            answer.failures.append(answer.error)
        self._done += not answer.error
        self._driver._folder.turn(
            Turn(
                program=self.plan.name,
                turn=index,
                start_s=start_s,
                latency_s=answer.ended - answer.sent,
                ttft_s=answer.first - answer.sent if answer.first else 0.0,
                tpot_s=answer.tpot_s,
                gaps_ms=answer.gaps_ms,
                prompt_tokens=answer.num_prompt,
                cached_tokens=answer.num_cached,
                answer_tokens=answer.num_answered,
                tries=len(answer.failures) + (not answer.error),
                failures=answer.failures,
                error=answer.error,
                answer=list(answer.tokens),
                text=answer.text if self._messages else "",
            )
        )


async def warm_up(api: Api, load: Load, programs: int) -> None:
    """Send the first turns of that many programs at once, with ids of their own.

    Raises ApiError if one fails: the reason is then the same for all that would follow.
    A server's first requests pay for imports and compilation, and nobody's JCT should.
    """
    tokens = Tokens(load.tokens.seed + WARM_UP_SEED)

    async def one(number: int) -> None:
        plan = load.workload.program(number, tokens.seed)
        turn = plan.turns[0]
        body = {"model": load.model, "prompt": tokens.of_turn(plan, 0), "temperature": 0.0}
        body |= {"max_tokens": turn.answer.length, "ignore_eos": True}
        answer = await api.complete(body)
        if answer.error:
            raise ApiError(answer.error, again=False)

    await asyncio.gather(*(one(number) for number in range(programs)))


# --- who puts it on a server -----------------------------------------------------------------
class ClientError(ToldError):
    """A client that cannot be used, or a load that it cannot play; the message says what to do."""


@dataclass(frozen=True)
class Client:
    """Who puts a load on a server: our own agents, by token ids of exact lengths, every answer of
    which is compared; or aiperf (aiperf.py), a load generator that nobody here wrote."""

    def settings(self) -> dict[str, Any]:
        """What two runs in one folder must have in common, beside their load."""
        return {}

    def check(self, load: Load) -> None:
        """ClientError if it cannot play this load."""

    async def drive(self, api: Api, load: Load, folder: RunFolder) -> None:
        """Play the load and write down what came of it; cancelled, it stops early."""
        await Driver(api, load, folder).run()


def find_client(name: str, model: Path, block_size: int) -> Client:
    """The client of this name for servers of that model and size of blocks; ClientError if there is
    none, or it is not installed."""
    if name == "aiperf":
        from bench.serve.aiperf import Aiperf

        return Aiperf.installed(model, block_size)
    if name != "agents":
        raise ClientError(f"--client {name}: not known; there is agents and aiperf")
    return Client()
