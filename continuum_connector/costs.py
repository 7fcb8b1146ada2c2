"""Costs: what it costs, in seconds. Events go in while serving, costs come out. One per engine.

What waiting costs: the price of a held block, by the Level of a queue; the paper's T and eta,
Queueing and Memoryfulness.

What steps and copies cost is fitted, and from data sheets until something was seen. RobustFit fits
costs over samples, some of which are bad. A sample that took ten times as long (a compile, a pause)
counts by its absolute deviation, not by its square. A thousand similar samples push out only
samples of their own kind, so what unlike ones taught is not forgotten.

CopyModel: a copy's latency and seconds per block.

PrefillModel: what it costs to prefill a prompt, from how long each engine step took. A step takes
base + per_token * new + per_pair * new * (cached + new / 2) + per_decode * decodes
+ per_context * decode context: linear layers, attention, the same for generating requests,
and launch and weight reads in the base. The paper fits a parabola to one prompt's time
(section 4.2); this is that parabola, with the cached prefix and a mixed batch told apart.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Long enough to see several turns of the queue (each waits seconds for blocks), short enough
# to follow a load that swings within minutes.
TIME_CONSTANT_S = 30.0
QUIET = 0.01  # a smaller share is left from a wait long past: nobody waits now
_WARMUP = 100  # turns; until then the mean size is the arithmetic mean
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
        self._blocked = Level(TIME_CONSTANT_S)  # 1 while a turn waits for blocks
        self._num_turns = 0
        self.mean_blocks = 1.0  # of a turn at its end (the paper's M, of those that ran)
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
        """A waiting turn could not be admitted for lack of blocks. May be called repeatedly."""
        self._blocked.set(1.0, now)

    def unblocked(self, now: float) -> None:
        """No turn waits for blocks any more. May be called repeatedly."""
        self._blocked.set(0.0, now)

    def footprint(self, num_blocks: int) -> None:
        """A turn that ran has ended with `num_blocks`, over all KV groups."""
        self._num_turns += 1
        weight = max(1.0 / self._num_turns, 1.0 / _WARMUP)
        self.mean_blocks += weight * (max(1, num_blocks) - self.mean_blocks)

    def assume(
        self,
        *,
        block_bytes: int = 0,
        prefill: tuple[float, float, float] | None = None,
        footprint: int = 0,
    ) -> None:
        """What costs are until some were measured: copies by the bytes of a block, a prefill as
        `prefill_prior` has it. Without, DRAM would look as near as VRAM and no turn worth keeping.
        `footprint`: blocks of an average turn. What is left out stays as it is."""
        if block_bytes:
            self._store.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_BUS)
            self._read.guess(GUESSED_LATENCY_S, block_bytes / GUESSED_DISK)
        if prefill is not None:
            self._prefill.assume(prefill)
        if footprint and not self._num_turns:
            self.mean_blocks = float(footprint)

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

    def share_blocked(self, now: float) -> float:
        """The share of recent time in which some turn waited for blocks."""
        share = self._blocked.mean(now)
        return share if share >= QUIET else 0.0

    def price(self, now: float) -> float:
        """Seconds of delay that one block held for one second costs the others.

        While a turn waits, every second costs it a second, and about as many blocks as a mean turn
        has would end that. So each held block causes that share of it.
        """
        return self.share_blocked(now) / self.mean_blocks

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
HALF_LIFE_TURNS = 5000


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
        decay = 0.5 ** (n / HALF_LIFE_TURNS)
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


EFFICIENCY = 0.5  # of a data sheet's products that a prefill reaches; measured ones do 0.4 to 0.7
STEP_S = 5e-3  # of each step, whatever it computes: scheduling, launches, sampling


class Device(NamedTuple):
    """`flops`: dense 16-bit products per second; `memory_rate`: bytes per second."""

    flops: float
    memory_rate: float


class Shape(NamedTuple):
    """One rank's share of a model: operations per token, operations of attention per token and
    token before it, bytes of weights that a step reads."""

    token_flops: float
    pair_flops: float
    weight_bytes: float


# A part of the device's name -> its data sheet.
KNOWN = {
    "T4": Device(65e12, 0.32e12),
    "V100": Device(125e12, 0.9e12),
    "A10": Device(125e12, 0.6e12),
    "A10G": Device(70e12, 0.6e12),
    "A30": Device(165e12, 0.93e12),
    "A40": Device(150e12, 0.7e12),
    "A100": Device(312e12, 1.9e12),
    "A800": Device(312e12, 1.9e12),
    "3090": Device(71e12, 0.94e12),
    "4090": Device(165e12, 1.0e12),
    "5090": Device(210e12, 1.8e12),
    "L4": Device(121e12, 0.3e12),
    "L20": Device(119e12, 0.86e12),
    "L40": Device(181e12, 0.86e12),
    "L40S": Device(362e12, 0.86e12),
    "H20": Device(148e12, 4.0e12),
    "H100": Device(989e12, 3.35e12),
    "H800": Device(989e12, 3.35e12),
    "GH200": Device(989e12, 4.0e12),
    "H200": Device(989e12, 4.8e12),
    "B200": Device(2250e12, 8.0e12),
    "GB200": Device(2250e12, 8.0e12),
    "B300": Device(2250e12, 8.0e12),
    "GB300": Device(2250e12, 8.0e12),
    "MI250X": Device(190e12, 1.6e12),  # one of its two halves, which are devices of their own
    "MI300X": Device(1307e12, 5.3e12),
    "MI325X": Device(1307e12, 6.0e12),
    "MI350X": Device(2300e12, 8.0e12),
    "MI355X": Device(2500e12, 8.0e12),
}
# CUDA compute capability, major -> the slowest of those that serve models, for names not above.
GENERATIONS = {
    7: KNOWN["T4"],
    8: KNOWN["A10G"],
    9: KNOWN["H20"],
    10: KNOWN["B200"],
    12: KNOWN["5090"],
}
UNKNOWN = KNOWN["T4"]
CORE = Device(50e9, 10e9)  # of a CPU: 16 products a cycle; its share of the memory's rate
# A model of which vLLM cannot say what it computes: 8 billion parameters in 16 bits.
TYPICAL = Shape(16e9, 0.5e6, 16e9)


def device_named(name: str, generation: int | None = None) -> Device:
    """The device that vLLM calls `name`. `generation`: its CUDA capability's major number."""
    for word in re.split(r"[^A-Za-z0-9]+", name):
        if word.upper() in KNOWN:
            return KNOWN[word.upper()]
    return UNKNOWN if generation is None else GENERATIONS.get(generation, UNKNOWN)


def cpu(num_cores: int) -> Device:
    """A CPU of so many cores."""
    return Device(num_cores * CORE.flops, num_cores * CORE.memory_rate)


def prefill_prior(shape: Shape, device: Device) -> tuple[float, float, float]:
    """Seconds that a prefill takes: per step, per token, per token and token before it."""
    flops = device.flops * EFFICIENCY
    base = STEP_S + shape.weight_bytes / device.memory_rate
    return base, shape.token_flops / flops, shape.pair_flops / flops


Array = npt.NDArray[np.float64]

NUM_KINDS = 64  # kinds differ by a factor of 4 in some feature; a server shows a dozen or two
PER_KIND = 8  # the latest samples of each kind; a median of 8 tolerates three outliers
# After this many other samples, a sample counts half: what a clock throttled an hour ago measured
# says little, but more than nothing, about lengths not seen since.
HALF_LIFE = 2000
FLAT = 0.05  # smaller relative deviations are noise, and no reason to weigh a sample less
ROUNDS = 3  # of reweighting, which starts from the last fit and so is nearly there


class RobustFit:
    """Least absolute relative deviations over the samples kept, with no cost below 0.

    An `add` takes microseconds; every 128th, and a few of the first ones, also fits, which takes
    some 0.2 ms. Memory is bounded by NUM_KINDS * PER_KIND samples.
    """

    def __init__(self, num_features: int) -> None:
        self._x: Array = np.zeros((NUM_KINDS * PER_KIND, num_features))
        self._seconds: Array = np.zeros(NUM_KINDS * PER_KIND)
        self._serial: Array = np.zeros(NUM_KINDS * PER_KIND)
        # kind -> (its row among kinds, samples seen), least recently seen first
        self._kinds: OrderedDict[tuple[int, ...], tuple[int, int]] = OrderedDict()
        self._num_added = self._next_fit = 0
        self.coefficients: tuple[float, ...] = (0.0,) * num_features

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Add an observation: `features` (all >= 0) took `seconds`. Impossible ones are skipped."""
        if not 0.0 < seconds < math.inf:
            return
        kind = tuple([(math.frexp(feature)[1] + 1) >> 1 for feature in features])
        place, seen = self._kinds.pop(kind, (-1, 0))
        if place < 0:
            place = len(self._kinds)
            if place == NUM_KINDS:
                place = self._kinds.popitem(last=False)[1][0]
                self._seconds[place * PER_KIND : (place + 1) * PER_KIND] = 0.0
        self._kinds[kind] = (place, seen + 1)
        row = place * PER_KIND + seen % PER_KIND
        self._num_added += 1
        self._x[row] = features
        self._seconds[row] = seconds
        self._serial[row] = self._num_added
        if self._num_added >= self._next_fit:
            self.fit()

    def fit(self) -> None:
        """Fit all kept samples. While serving, `add` calls this often enough."""
        self._next_fit = self._num_added + min(128, max(4, self._num_added // 2))
        rows = np.flatnonzero(self._seconds)
        x, seconds = self._x[rows], self._seconds[rows]
        recent = 0.5 ** ((self._num_added - self._serial[rows]) / HALF_LIFE)
        predicted = x @ np.asarray(self.coefficients)
        weight = recent
        if predicted.min() > 0.0:
            weight = recent / np.maximum(np.abs(seconds / predicted - 1.0), FLAT)
        else:
            predicted = seconds
        try:
            with np.errstate(all="raise", under="ignore"):
                for _ in range(ROUNDS):
                    solution = _solve(x / predicted[:, None], seconds / predicted, weight)
                    fitted = x @ solution
                    predicted = np.where(fitted > 0.0, fitted, seconds)
                    weight = recent / np.maximum(np.abs(seconds / predicted - 1.0), FLAT)
        except (np.linalg.LinAlgError, FloatingPointError):  # the samples are too alike for floats
            return
        self.coefficients = tuple(solution.tolist())


def _solve(x: Array, y: Array, weight: Array) -> Array:
    """Weighted least squares; costs below 0 become 0. Weights are scaled to 1 on average, and
    there is just enough of a ridge to solve it if features are collinear."""
    weight = weight / weight.sum() * len(weight)
    weighted = x * weight[:, None]
    a, b = x.T @ weighted, y @ weighted
    scale = a.diagonal() / len(weight)
    a = a + np.diag(np.where(scale > 0.0, 1e-6 * scale, 1.0))
    solution = np.zeros(len(b))
    left = np.arange(len(b))
    while len(left):
        root = np.sqrt(a.diagonal()[left])  # to unit diagonal: features span ten decades
        part = np.linalg.solve(a[np.ix_(left, left)] / np.outer(root, root), b[left] / root)
        part = part / root
        if part.min() >= 0.0:
            solution[left] = part
            break
        left = np.delete(left, part.argmin())
    return solution


MIN_TRANSFERS = 4  # two costs need two unlike transfers; this is twice as many


class CopyModel:
    """Latency + seconds per block, from queued to settled, because a turn waits for that."""

    def __init__(self) -> None:
        self._fit = RobustFit(2)
        self._guess = (0.0, 0.0)
        self.num_transfers = 0

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from enough transfers."""
        return self.num_transfers >= MIN_TRANSFERS

    def guess(self, latency: float, per_block: float) -> None:
        """What `seconds` answers with until something is known."""
        self._guess = (latency, per_block)

    def add(self, num_blocks: int, seconds: float) -> None:
        """A transfer of `num_blocks` settled `seconds` after it was queued; 0 is ignored."""
        if seconds <= 0.0:
            return
        self._fit.add((1.0, num_blocks), seconds)
        self.num_transfers += 1

    def seconds(self, num_blocks: int) -> float:
        """Seconds that `num_blocks` take; 0.0 for none."""
        if num_blocks <= 0:
            return 0.0
        latency, per_block = self._fit.coefficients if self.is_known else self._guess
        return latency + per_block * num_blocks


# We look at one in so many of the steps that only decode: they are alike, and there are thousands
# between two prompts.
DECODES_PER_LOOK = 8
# Steps in flight at once: 2 under async scheduling, one per stage of a pipeline.
MAX_IN_FLIGHT = 64


class Work(NamedTuple):
    """What one step computes.

    `num_new`: prompt tokens. `pairs`: attention over them, the sum over prompts of new tokens
    times the tokens in front of each on average, new * (cached + new / 2). `num_decodes`:
    requests that generate. `decode_context`: tokens that those attend to, over all of them.
    """

    num_new: int = 0
    pairs: float = 0.0
    num_decodes: int = 0
    decode_context: int = 0

    @classmethod
    def of(
        cls,
        scheduled: Mapping[str, int],
        num_requests: int,
        computed: Callable[[str], int],
        context: int,
        drafts: Mapping[str, Sequence[int]],
    ) -> Work:
        """Add up the requests of a step. `scheduled`: tokens by request, of those that get more
        than one; others may be left out, and `num_requests` counts all. `drafts`: those of the
        tokens that are drafts. `computed`: how many tokens come before a prompt's. `context`: how
        many come before those of all requests."""
        num_new, pairs = 0, 0.0
        for request, num in scheduled.items():
            if num != 1 and num - len(drafts.get(request, ())) != 1:  # a prompt
                cached = computed(request)
                num_new += num
                pairs += num * (cached + num / 2)
                num_requests -= 1
                context -= cached
        return cls(num_new, pairs, num_requests, context)

    def __bool__(self) -> bool:
        return bool(self.num_new or self.num_decodes)


class StepClock:
    """Pairs each schedule() with its update_from_output(), which come in the same order.

    A step begins when it was scheduled, or when the step before it was done if that was later
    (async scheduling, pipelines), and ends when its output arrives. Steps that compute nothing are
    not timed, but end the one before.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Work | None, float]] = deque(maxlen=MAX_IN_FLIGHT)
        self._last_done = 0.0
        self._num_steps = 0

    @property
    def skips_decodes(self) -> bool:
        """Whether the coming step, if it only decodes, need not say what it computes."""
        return bool(self._num_steps % DECODES_PER_LOOK)

    def scheduled(self, work: Work | None, now: float) -> None:
        """schedule() has built a step. `work` is None if we do not look at it."""
        self._num_steps += 1
        self._in_flight.append((work, now))

    def done(self, now: float) -> tuple[Work, float] | None:
        """A step's output has arrived: return what it computed and how many seconds it took, or
        None."""
        if not self._in_flight:
            return None
        work, began = self._in_flight.popleft()
        began = max(began, self._last_done)
        self._last_done = now
        return (work, now - began) if work and now > began else None


# Five costs need five unlike steps; with three times as many, no single step decides.
MIN_STEPS = 16
# Until then, the better rate of two steps that computed enough for their base not to matter much.
# It is rather too slow than too fast, but it gives a server's first minute something to go by.
MIN_FIRST_STEPS, MIN_FIRST_TOKENS = 2, 128


class PrefillModel:
    """`chunk`: tokens that one step computes at most (max_num_batched_tokens)."""

    def __init__(self, chunk: int) -> None:
        self._chunk = max(1, chunk)
        self._fit = RobustFit(5)
        self.num_steps = 0  # those with prompt tokens
        self._num_first_steps = 0
        self._first_rate = math.inf  # seconds per token
        self._prior = (0.0, 0.0, 0.0)  # seconds: base, per_token, per_pair

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from enough steps."""
        return self.num_steps >= MIN_STEPS

    @property
    def is_roughly_known(self) -> bool:
        """Whether `seconds` answers from something that was measured, not from the prior."""
        return self.is_known or self._num_first_steps >= MIN_FIRST_STEPS

    def assume(self, prior: tuple[float, float, float]) -> None:
        """What `seconds` answers with until something was measured: base, per_token, per_pair."""
        self._prior = prior

    def add(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took `seconds`."""
        self._fit.add((1.0, *work), seconds)
        self.num_steps += work.num_new > 0
        if not self.is_known and work.num_new >= MIN_FIRST_TOKENS and seconds > 0.0:
            self._num_first_steps += 1
            self._first_rate = min(self._first_rate, seconds / work.num_new)

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds to prefill `num_new` tokens behind `num_cached`, with the engine to itself.

        Counts the base once for each step that it takes. 0.0 without a prior while nothing is
        known: then a kept block is worth nothing, and turns are served as without us.
        """
        if num_new <= 0:
            return 0.0
        base, per_token, per_pair = self._costs()
        num_steps = -(-num_new // self._chunk)
        pairs = num_new * (num_cached + num_new / 2)
        return num_steps * base + per_token * num_new + per_pair * pairs

    def _costs(self) -> tuple[float, float, float]:
        """Base, per_token and per_pair, from the best that is known."""
        if self.is_known:
            base, per_token, per_pair, _, _ = self._fit.coefficients
            return base, per_token, per_pair
        return (0.0, self._first_rate, 0.0) if self.is_roughly_known else self._prior
