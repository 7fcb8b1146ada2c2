"""FakeServer: the storm's server without a model, in virtual time.

Real: vLLM's Scheduler, block pool and requests, both queues, all of our scheduler half, our
middleware, vLLM's schemas (front.py). Modelled, as in the lab: how long steps and copies take, and
what the model says. No bytes are copied, so no answer can be wrong: tests/vllm has a worker that
compares every byte.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serve.metrics import Metrics
from bench.sim.arms.ours import our_transfer, our_worker, set_up
from bench.sim.bus import Bus
from bench.sim.clock import Clock
from bench.sim.engine import Engine, Progress
from bench.sim.hardware import GB, Machine, machine
from bench.storm import front
from bench.storm.judge import ABORTED, RESET_REFUSED, Ended
from continuum_connector.observe.account import METRICS, Kind
from continuum_connector.switch_endpoint import PERIOD_S, SwitchFile

BLOCK_SIZE = 32
NUM_BLOCKS = 129  # a third of what is alive at a time: preemptions, and pins that give way
DRAM_BLOCKS = 397
POLICY = "fixed_ttl"  # others learn that so small a model needs no pin
MAX_TTL_S = 6.0
MOST_PROGRAMS = 200  # of the table: full early on, so that what grows later is a leak
MAX_MODEL_LEN = 4096
TIMEOUT_S = 180.0
STEP_S = 0.02  # so slow that clients hang up, and turns overlap, as on a CPU
NAP_S = 0.25  # an idle engine is asked so often whether it has something to do


def storm_machine() -> Machine:
    """Memory in blocks, and slow steps."""
    vram = {"kv_tokens": (NUM_BLOCKS - 1) * BLOCK_SIZE, "block_size": BLOCK_SIZE}
    dram_gb = DRAM_BLOCKS * machine("A100-40", **vram).block_bytes / GB
    return machine("A100-40", dram_gb=dram_gb, step_s=STEP_S, **vram)


class StuckError(RuntimeError):
    """Somebody waits, and nothing is under way that could end it."""


@dataclass
class _Turn:
    """One request of the engine. `stop_at`: tokens after which the front end ends it, because a
    stop string is complete."""

    progress: Progress
    stop_at: int
    answered: asyncio.Future[None]


class FakeServer:
    """Answers the storm's agents; virtual time passes where `go_on` is called."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.switch = folder / "switch"
        on = storm_machine()
        own = {"max_ttl_s": MAX_TTL_S, "max_programs": MOST_PROGRAMS}
        own["trace_path"] = str(folder / "trace.jsonl")
        self.engine = Engine(on, self.clock, MAX_MODEL_LEN, our_transfer(POLICY, True, **own)(on))
        self.engine.worker = our_worker(self.engine, Bus(on.gpu.pcie_rate))
        set_up(self.engine)
        # Looked at in virtual time: its thread, never started here, would look in the machine's.
        self.engine.connector.switch = self._switch = SwitchFile(str(self.switch), None)
        self._look_at = 0.0
        self._turns: dict[str, _Turn] = {}
        self._numbers = itertools.count()
        self._num_prompt = self._num_local = 0

    # --- what agents ask --------------------------------------------------------------
    async def generate(
        self, api: str, payload: bytes, headers: Mapping[str, str], abort_s: float = 0.0
    ) -> Ended:
        """Answer a request; give it up after `abort_s`, unless it is 0."""
        try:
            return await asyncio.wait_for(self._ask(api, payload, headers), abort_s or TIMEOUT_S)
        except asyncio.TimeoutError:
            return Ended(ABORTED if abort_s else f"no answer within {TIMEOUT_S:g} s")

    async def reset(self, **how: bool) -> Ended:
        """Empty the prefix cache, as vLLM's API server has its engine do it."""
        try:
            self.engine.scheduler.reset_prefix_cache(**how)
        except RuntimeError as error:
            is_vllms = "Failed to reset KV cache" in str(error)
            return Ended(RESET_REFUSED if is_vllms else "500", str(error))
        return Ended("200")

    async def _ask(self, api: str, payload: bytes, headers: Mapping[str, str]) -> Ended:
        try:
            asked = await front.read(api, payload, headers, MAX_MODEL_LEN)
        except front.RefusedError as error:
            return Ended("400", str(error))
        except Exception as error:  # the top of a request in vLLM's API server
            return Ended("500", f"{type(error).__name__}: {error}")
        name = f"{api}-{next(self._numbers)}"
        answers = asked.answers()
        names = [f"{index}_{name}" if len(answers) > 1 else name for index in range(len(answers))]
        for request_id, answer in zip(names, answers, strict=True):
            self._send(request_id, asked, answer)
        try:
            await asyncio.gather(*(self._turns[each].answered for each in names))
        finally:  # a client that hung up
            for request_id in names:
                if self._turns.pop(request_id, None) is not None:
                    self.engine.abort(request_id)
        return Ended("200", asked.text(answers[0]))

    def _send(self, request_id: str, asked: front.Asked, answer: Sequence[int]) -> None:
        params = copy.copy(asked.params)
        params.n = 1  # vLLM's own way to more than one answer: as many requests
        fields = {"cache_salt": asked.salt, "arrival_time": self.clock.now}
        progress = self.engine.send(request_id, asked.tokens, params, answer, **fields)
        answered = asyncio.get_running_loop().create_future()
        self._turns[request_id] = _Turn(progress, asked.num_said(answer), answered)

    # --- time -------------------------------------------------------------------------
    def go_on(self, until_next_s: float) -> None:
        """A step of the engine, or some time without one; StuckError if nothing could happen."""
        if self.clock.now >= self._look_at:
            self._switch.look()
            self._look_at = self.clock.now + PERIOD_S
        if not self.engine.has_requests:
            if math.isinf(until_next_s):
                raise StuckError(f"turns without an end: {sorted(self._turns)}")
            self.clock.now += min(until_next_s, NAP_S)
            return
        soon = self.clock.now + min(until_next_s, NAP_S)
        for finished in self.engine.step(lambda: min(soon, self.engine.worker.next_done())):
            self._answer(finished.request_id)
        for request_id, turn in list(self._turns.items()):
            if turn.progress.num_said >= turn.stop_at and not turn.answered.done():
                self.engine.abort(request_id)
                self._answer(request_id)

    def _answer(self, request_id: str) -> None:
        turn = self._turns.pop(request_id)
        self._num_prompt += turn.progress.request.num_prompt_tokens
        self._num_local += turn.progress.num_local
        turn.answered.set_result(None)

    # --- what is left -----------------------------------------------------------------
    def metrics(self) -> Metrics:
        """As a scrape would show them, by the names of /metrics."""
        connector = self.engine.connector
        connector.side.update_gauges()
        found: Metrics = {
            ("vllm:prefix_cache_hits_total", frozenset()): self._num_local,
            ("vllm:prefix_cache_queries_total", frozenset()): self._num_prompt,
        }
        for metric in METRICS:
            name = metric.full_name + "_total" * (metric.kind is Kind.COUNTER)
            for label in metric.labels:
                labels = frozenset({(metric.label, label)} if label else ())
                found[name, labels] = connector.account.total(metric.name, label)
        return found

    def held(self) -> dict[str, float]:
        """What the block pool and the tables say that is still held, whatever the books do."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        found = {
            "VRAM blocks": self.engine.machine.num_blocks - 1 - pool.get_num_free_blocks(),
            "turns": len(self.engine.connector.side.turns),
            "requests": len(self.engine.scheduler.requests),
        }
        return {name: float(number) for name, number in found.items() if number}

    def close(self) -> None:
        """End the connector's threads."""
        self.engine.scheduler.shutdown()
