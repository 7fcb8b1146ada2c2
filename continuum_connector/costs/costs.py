"""Costs: events go in, costs in seconds come out. One per engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from continuum_connector.costs.fit import CopyModel
from continuum_connector.costs.prefill import PrefillModel, Work
from continuum_connector.costs.pressure import Memoryfulness, Price, Queueing

GUESSED_LATENCY_S, GUESSED_BUS = 1e-3, 12e9  # about a step; half of PCIe 4.0 x16, bytes per second
GUESSED_DISK = 2e9  # bytes per second: half of what an NVMe drive on PCIe 4.0 reads, for two ranks
LONG_PREFIX = 32768  # tokens; the second length at which the prefill metric is given
NUM_STEPS = 8  # recent steps: every one with a prompt, a sample of those that only decode


@dataclass(frozen=True)
class _Models:
    """The models: they learn from what happens, and say what it costs."""

    prefill: PrefillModel
    load: CopyModel
    store: CopyModel
    read: CopyModel
    bus: CopyModel
    queueing: Queueing
    memory: Memoryfulness
    price: Price
    steps: deque[float]


class Seen:
    """Takes in what happened, in microseconds per event."""

    def __init__(self, models: _Models) -> None:
        self._models = models

    def step(self, work: Work, seconds: float) -> None:
        """An engine step is done."""
        self._models.prefill.add(work, seconds)
        self._models.steps.append(seconds)

    def loaded(self, num_blocks: int, seconds: float, bus_s: float = 0.0) -> None:
        """A load of `num_blocks` is done, `seconds` after it was queued. For `bus_s` of them the
        bus was busy with it (0: not known)."""
        self._models.load.add(num_blocks, seconds)
        self._models.bus.add(num_blocks, bus_s)

    def stored(self, num_blocks: int, seconds: float) -> None:
        """A store of `num_blocks` is done, `seconds` after it was queued."""
        self._models.store.add(num_blocks, seconds)

    def read(self, num_blocks: int, seconds: float, is_done: bool = True) -> None:
        """A read of `num_blocks` from disk is done, `seconds` after it was queued, or was given up
        then. One that was given up counts only if it took longer than expected: without it, nobody
        would learn that a disk is too slow for every deadline."""
        if is_done or seconds > self._models.read.seconds(num_blocks):
            self._models.read.add(num_blocks, seconds)

    def waited(self, seconds: float, was_evicted: bool, now: float) -> None:
        """A turn was admitted; `was_evicted`: its program had blocks once and lost them."""
        if was_evicted:
            self._models.queueing.waited(seconds, now)

    def program_over(self, num_turns: int) -> None:
        """A program had its last turn."""
        self._models.memory.program_over(num_turns)

    def blocked(self, now: float) -> None:
        """A waiting turn could not be admitted for lack of blocks."""
        self._models.price.blocked(now)

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks."""
        self._models.price.unblocked(now)

    def footprint(self, num_blocks: int) -> None:
        """A turn that ran has ended with `num_blocks`, over all KV groups."""
        self._models.price.footprint(num_blocks)

    def assume(
        self,
        *,
        block_bytes: int = 0,
        prefill: tuple[float, float, float] | None = None,
        footprint: int = 0,
    ) -> None:
        """What costs are until some were measured: copies by the bytes of a block, a prefill as
        costs/prior.py says it. Without, DRAM would look as near as VRAM and no turn worth keeping.
        `footprint`: blocks of an average turn. What is left out stays as it is."""
        if block_bytes:
            self._models.store.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_BUS)
            self._models.read.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_DISK)
        if prefill is not None:
            self._models.prefill.assume(prefill)
        if footprint:
            self._models.price.assume(footprint)


class Costs:
    """Everything the policies pay with. `chunk`: max_num_batched_tokens.

    `seen` takes in what happened. For the scheduler's thread only. Until prefills and copies were
    measured, their costs are those of a prior; any other cost that is not known yet is 0.
    """

    def __init__(self, chunk: int) -> None:
        self._models = _Models(
            prefill=PrefillModel(chunk),
            load=CopyModel(),
            store=CopyModel(),
            read=CopyModel(),
            bus=CopyModel(),
            queueing=Queueing(),
            memory=Memoryfulness(),
            price=Price(),
            steps=deque(maxlen=NUM_STEPS),
        )
        self.seen = Seen(self._models)

    # --- what it costs ------------------------------------------------------------------
    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds to compute `num_tokens` behind `num_cached` cached ones."""
        return self._models.prefill.seconds(num_tokens, num_cached)

    def load_s(self, num_blocks: int) -> float:
        """Seconds to bring `num_blocks` back from DRAM; until loads were seen, as for stores."""
        model = self._models.load if self._models.load.is_known else self._models.store
        return model.seconds(num_blocks)

    def bus_s(self, num_blocks: int) -> float:
        """Seconds that the bus takes to bring `num_blocks` from DRAM, once they are next."""
        return self._models.bus.seconds(num_blocks) if self._models.bus.is_known else 0.0

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds that a step takes, the shortest and the longest of the last few."""
        steps = self._models.steps
        return (min(steps), max(steps)) if steps else (0.0, 0.0)

    @property
    def knows_prefill(self) -> bool:
        """Whether `prefill_s` is more than a guess."""
        return self._models.prefill.is_known

    @property
    def has_prior_prefill(self) -> bool:
        """Whether `prefill_s` is from a prior: nothing was measured yet."""
        return not self._models.prefill.is_roughly_known

    def read_s(self, num_blocks: int) -> float:
        """Seconds to bring `num_blocks` from disk to DRAM."""
        return self._models.read.seconds(num_blocks)

    def queueing_s(self, now: float) -> float:
        """Seconds that a turn waits if it has lost its blocks (the paper's T)."""
        return self._models.queueing.mean(now)

    @property
    def eta(self) -> float:
        """How much a program's age says about its end, -1 to 1 (memoryfulness)."""
        return self._models.memory.eta

    @property
    def mean_blocks(self) -> float:
        """Blocks of a turn at its end, on average (the paper's M, of those that ran)."""
        return self._models.price.mean_blocks

    def price(self, now: float) -> float:
        """Seconds of delay that one held block costs the others per second."""
        return self._models.price.per_block_second(now)

    def gauges(self, now: float) -> Iterator[tuple[str, float, str | None]]:
        """Every number as (metric, value, label), as Account.gauge takes it."""
        per_token = "prefill_seconds_per_token"
        yield per_token, self.prefill_s(1000) / 1000, "0"
        yield per_token, self.prefill_s(1000, LONG_PREFIX) / 1000, str(LONG_PREFIX)
        yield "load_seconds_per_block", self.load_s(1000) / 1000, None
        yield "read_seconds_per_block", self.read_s(1000) / 1000, None
        yield "queueing_seconds", self.queueing_s(now), None
        yield "memoryfulness", self.eta, None
        yield "block_second_price", self.price(now), None
        yield "costs_known", float(self._models.prefill.is_known), "prefill"
        yield "costs_known", float(self._models.load.is_known), "load"
        yield "costs_known", float(self._models.memory.is_known), "memoryfulness"
