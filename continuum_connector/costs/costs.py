"""Costs: events go in, costs in seconds come out. One per engine.

What waiting costs is here, too: Price of a held block, Level of a queue; the paper's T and eta,
Queueing and Memoryfulness. What steps and copies cost is fitted in fit.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from continuum_connector.costs.fit import CopyModel, PrefillModel, Work

# Long enough to see several turns of the queue (each waits seconds for blocks), short enough
# to follow a load that swings within minutes.
TIME_CONSTANT_S = 30.0
QUIET = 0.01  # a smaller share is left from a wait long past: nobody waits now
_WARMUP = 100  # turns; until then the mean size is the arithmetic mean


class Level:
    """A level that goes up and down, and its mean over recent time."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._mean = self._level = 0.0
        self._last = -math.inf

    def set(self, level: float, now: float) -> None:
        """It is at `level` from `now` on. May be called repeatedly."""
        self._advance(now)
        self._level = level

    def mean(self, now: float) -> float:
        """The mean, in which what was a time constant ago weighs 1 / e of what is."""
        self._advance(now)
        return self._mean

    def _advance(self, now: float) -> None:
        if now <= self._last:
            return
        kept = math.exp((self._last - now) / self._time_constant_s)
        self._mean = self._mean * kept + (1.0 - kept) * self._level
        self._last = now


class Price:
    """Share of recent time in which a turn waited for blocks / mean blocks of a turn.

    While a turn waits, every second costs it a second, and about as many blocks as a mean turn has
    would end that. So each held block causes that share of it.
    """

    def __init__(self) -> None:
        self._blocked = Level(TIME_CONSTANT_S)  # 1 while a turn waits
        self.num_turns = 0
        self.mean_blocks = 1.0

    def blocked(self, now: float) -> None:
        """A waiting turn could not be admitted for lack of blocks. May be called repeatedly."""
        self._blocked.set(1.0, now)

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks any more. May be called repeatedly."""
        self._blocked.set(0.0, now)

    def assume(self, num_blocks: int) -> None:
        """What the mean is until a turn was counted."""
        if not self.num_turns:
            self.mean_blocks = float(max(1, num_blocks))

    def footprint(self, num_blocks: int) -> None:
        """Count the blocks of a turn."""
        self.num_turns += 1
        weight = max(1.0 / self.num_turns, 1.0 / _WARMUP)
        self.mean_blocks += weight * (max(1, num_blocks) - self.mean_blocks)

    def share(self, now: float) -> float:
        """The share of recent time in which some turn waited for blocks."""
        share = self._blocked.mean(now)
        return share if share >= QUIET else 0.0

    def per_block_second(self, now: float) -> float:
        """Seconds of delay that one block held for one second costs the others."""
        return self.share(now) / self.mean_blocks


WINDOW = 100  # turns; the paper gives no size, so this is its K for tool durations
# Load changes within minutes: a rush hour's waits are no reason to pin in the quiet after it.
MAX_AGE_S = 600.0


class Queueing:
    """Mean wait in seconds over the last turns that had been evicted; 0 at first (section 4.2)."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def waited(self, seconds: float, now: float) -> None:
        """A turn whose program had lost blocks was admitted after `seconds` in the queue."""
        self._waits.append((now, max(0.0, seconds)))
        self._total += max(0.0, seconds)
        if len(self._waits) > WINDOW:
            self._drop_oldest()

    def mean(self, now: float) -> float:
        """Mean wait of such a turn in seconds. Each wait is dropped once, so calls are cheap."""
        while self._waits and self._waits[0][0] < now - MAX_AGE_S:
            self._drop_oldest()
        return self._total / len(self._waits) if self._waits else 0.0

    def _drop_oldest(self) -> None:
        self._total -= self._waits.popleft()[1]
        if not self._waits:
            self._total = 0.0  # so that rounding errors do not add up


# A correlation over n programs is uncertain by about 1 / sqrt(n): 0.22 here. Below that the
# paper's cold start holds: every program takes the same number of turns, eta = 1.
MIN_PROGRAMS = 20
# Turns, some 500 programs; a server's agents change with deployments, not by the minute. By
# turns, so that a crowd of short programs does not drive out what a few long ones taught.
HALF_LIFE = 5000


class Memoryfulness:
    """eta = -Corr(k, N - k) over the turns k = 1..N of finished programs of N turns.

    1: all programs have the same length. 0: the number of turns left is the same at any age. Below
    0: the older a program, the more turns are left. The sums have a closed form, so a program costs
    O(1).
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self._sums = [0.0] * 6  # of 1, k, left, k * k, left * left, k * left; left = N - k

    @property
    def is_known(self) -> bool:
        """Whether enough programs have finished."""
        return self.num_programs >= MIN_PROGRAMS

    def program_over(self, num_turns: int) -> None:
        """A program finished after `num_turns` turns. One without turns says nothing."""
        n = num_turns
        if n < 1:
            return
        self.num_programs += 1
        terms = (
            n,
            n * (n + 1) / 2,
            n * (n - 1) / 2,
            n * (n + 1) * (2 * n + 1) / 6,
            (n - 1) * n * (2 * n - 1) / 6,
            n * (n + 1) * (n - 1) / 6,
        )
        decay = 0.5 ** (n / HALF_LIFE)
        self._sums = [s * decay + t for s, t in zip(self._sums, terms, strict=True)]

    @property
    def eta(self) -> float:
        """Memoryfulness, -1 to 1; 1 until enough programs have finished."""
        if not self.is_known:
            return 1.0
        one, k, left, kk, ll, kl = self._sums
        var_k, var_left = kk / one - (k / one) ** 2, ll / one - (left / one) ** 2
        if min(var_k, var_left) < 1e-9:  # every program had one turn, so all have the same length
            return 1.0
        correlation = (kl / one - k * left / one**2) / math.sqrt(var_k * var_left)
        return min(1.0, max(-1.0, -correlation))


GUESSED_LATENCY_S, GUESSED_BUS = 1e-3, 12e9  # about a step; half of PCIe 4.0 x16, bytes per second
GUESSED_DISK = 2e9  # bytes per second: half of what an NVMe drive on PCIe 4.0 reads, for two ranks
LONG_PREFIX = 32768  # tokens; the second length at which the prefill metric is given
NUM_STEPS = 8  # recent steps: every one with a prompt, a sample of those that only decode


class Costs:
    """Everything the policies pay with, and what teaches it, in microseconds per event. `chunk`:
    max_num_batched_tokens.

    For the scheduler's thread only. Until prefills and copies were measured, their costs are those
    of a prior; any other cost that is not known yet is 0.
    """

    def __init__(self, chunk: int) -> None:
        self._prefill = PrefillModel(chunk)
        self._load, self._store = CopyModel(), CopyModel()
        self._read, self._bus = CopyModel(), CopyModel()
        self._queueing = Queueing()
        self._memory = Memoryfulness()
        self._price = Price()
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)

    # --- what happened ------------------------------------------------------------------
    def step(self, work: Work, seconds: float) -> None:
        """An engine step is done."""
        self._prefill.add(work, seconds)
        self._steps.append(seconds)

    def loaded(self, num_blocks: int, seconds: float, bus_s: float = 0.0) -> None:
        """A load of `num_blocks` is done, `seconds` after it was queued. For `bus_s` of them the
        bus was busy with it (0: not known)."""
        self._load.add(num_blocks, seconds)
        self._bus.add(num_blocks, bus_s)

    def stored(self, num_blocks: int, seconds: float) -> None:
        """A store of `num_blocks` is done, `seconds` after it was queued."""
        self._store.add(num_blocks, seconds)

    def read(self, num_blocks: int, seconds: float, is_done: bool = True) -> None:
        """A read of `num_blocks` from disk is done, `seconds` after it was queued, or was given up
        then. One that was given up counts only if it took longer than expected: without it, nobody
        would learn that a disk is too slow for every deadline."""
        if is_done or seconds > self._read.seconds(num_blocks):
            self._read.add(num_blocks, seconds)

    def waited(self, seconds: float, was_evicted: bool, now: float) -> None:
        """A turn was admitted; `was_evicted`: its program had blocks once and lost them."""
        if was_evicted:
            self._queueing.waited(seconds, now)

    def program_over(self, num_turns: int) -> None:
        """A program had its last turn."""
        self._memory.program_over(num_turns)

    def blocked(self, now: float) -> None:
        """A waiting turn could not be admitted for lack of blocks."""
        self._price.blocked(now)

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks."""
        self._price.unblocked(now)

    def footprint(self, num_blocks: int) -> None:
        """A turn that ran has ended with `num_blocks`, over all KV groups."""
        self._price.footprint(num_blocks)

    def assume(
        self,
        *,
        block_bytes: int = 0,
        prefill: tuple[float, float, float] | None = None,
        footprint: int = 0,
    ) -> None:
        """What costs are until some were measured: copies by the bytes of a block, a prefill as
        fit.py says it. Without, DRAM would look as near as VRAM and no turn worth keeping.
        `footprint`: blocks of an average turn. What is left out stays as it is."""
        if block_bytes:
            self._store.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_BUS)
            self._read.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_DISK)
        if prefill is not None:
            self._prefill.assume(prefill)
        if footprint:
            self._price.assume(footprint)

    # --- what it costs ------------------------------------------------------------------
    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds to compute `num_tokens` behind `num_cached` cached ones."""
        return self._prefill.seconds(num_tokens, num_cached)

    def load_s(self, num_blocks: int) -> float:
        """Seconds to bring `num_blocks` back from DRAM; until loads were seen, as for stores."""
        model = self._load if self._load.is_known else self._store
        return model.seconds(num_blocks)

    def bus_s(self, num_blocks: int) -> float:
        """Seconds that the bus takes to bring `num_blocks` from DRAM, once they are next."""
        return self._bus.seconds(num_blocks) if self._bus.is_known else 0.0

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds that a step takes, the shortest and the longest of the last few."""
        steps = self._steps
        return (min(steps), max(steps)) if steps else (0.0, 0.0)

    @property
    def knows_prefill(self) -> bool:
        """Whether `prefill_s` is more than a guess."""
        return self._prefill.is_known

    @property
    def has_prior_prefill(self) -> bool:
        """Whether `prefill_s` is from a prior: nothing was measured yet."""
        return not self._prefill.is_roughly_known

    def read_s(self, num_blocks: int) -> float:
        """Seconds to bring `num_blocks` from disk to DRAM."""
        return self._read.seconds(num_blocks)

    def queueing_s(self, now: float) -> float:
        """Seconds that a turn waits if it has lost its blocks (the paper's T)."""
        return self._queueing.mean(now)

    @property
    def eta(self) -> float:
        """How much a program's age says about its end, -1 to 1 (memoryfulness)."""
        return self._memory.eta

    @property
    def mean_blocks(self) -> float:
        """Blocks of a turn at its end, on average (the paper's M, of those that ran)."""
        return self._price.mean_blocks

    def price(self, now: float) -> float:
        """Seconds of delay that one held block costs the others per second."""
        return self._price.per_block_second(now)

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
        yield "costs_known", float(self._prefill.is_known), "prefill"
        yield "costs_known", float(self._load.is_known), "load"
        yield "costs_known", float(self._memory.is_known), "memoryfulness"
