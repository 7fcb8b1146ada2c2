"""What engine steps and copies cost: fitted online, and from data sheets until something was seen.

RobustFit fits costs over samples, some of which are bad. A sample that took ten times as long (a
compile, a pause) counts by its absolute deviation, not by its square. A thousand similar samples
push out only samples of their own kind, so what unlike ones taught is not forgotten.

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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
