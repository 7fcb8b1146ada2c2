"""PrefillModel: seconds to prefill, fitted over the engine's steps while it serves.

A step takes base + per_token * new + per_pair * new * (cached + new / 2) + per_decode * decodes
+ per_context * decode context: linear layers, attention, the same for generating requests,
and launch and weight reads in the base. The paper fits a parabola to one prompt's time
(section 4.2); this is that parabola, with the cached prefix and a mixed batch told apart.

The fit (RobustFit) tolerates bad data. A step that took ten times as long (a compile, a pause)
counts by its absolute deviation, not its square. A thousand similar steps push out only steps of
their own kind, so what longer steps taught is not forgotten. A seed fills the directions in which
nothing was seen, and fades where something was.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from continuum_connector.costs.step_clock import Work

# Five costs need five unlike steps; three times that, and no single step decides.
MIN_STEPS = 16
# Until then: the best rate of two steps that computed enough for their base not to matter much.
# It is too slow rather than too fast, but a server's first minute is served by it, not by nothing.
MIN_FIRST_STEPS, MIN_FIRST_TOKENS = 2, 128


class PrefillModel:
    """`chunk`: tokens that one step computes at most (max_num_batched_tokens)."""

    def __init__(self, chunk: int) -> None:
        self._chunk = max(1, chunk)
        self._fit = RobustFit(5)
        self.num_steps = 0  # with prompt tokens in them
        self._num_first_steps = 0
        self._first_rate = math.inf  # seconds per token

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from a seed or from enough steps."""
        return self._fit.is_seeded or self.num_steps >= MIN_STEPS

    @property
    def is_roughly_known(self) -> bool:
        """Whether it answers at all."""
        return self.is_known or self._num_first_steps >= MIN_FIRST_STEPS

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds: base, per_token, per_pair, per_decode, per_context."""
        return self._fit.coefficients

    def seed(self, coefficients: Sequence[float]) -> None:
        """Start from coefficients measured before, on this model and GPU."""
        self._fit.seed(coefficients)

    def add(self, work: Work, seconds: float) -> None:
        """A step that computed `work` took `seconds`."""
        self._fit.add((1.0, *work), seconds)
        self.num_steps += work.num_new > 0
        if not self.is_known and work.num_new >= MIN_FIRST_TOKENS and seconds > 0.0:
            self._num_first_steps += 1
            self._first_rate = min(self._first_rate, seconds / work.num_new)

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds to prefill `num_new` tokens behind `num_cached`, with the engine to itself.

        Counts the base once per step it takes. 0.0 while nothing is known: then a kept block
        is worth nothing and turns are served as without us.
        """
        if num_new <= 0 or not self.is_roughly_known:
            return 0.0
        if not self.is_known:
            return num_new * self._first_rate
        base, per_token, per_pair, _, _ = self._fit.coefficients
        num_steps = -(-num_new // self._chunk)
        pairs = num_new * (num_cached + num_new / 2)
        return num_steps * base + per_token * num_new + per_pair * pairs

    def compute_s(self, work: Work) -> float:
        """Seconds that the prompts of a step add to it; 0.0 while nothing is known."""
        if not self.is_roughly_known:
            return 0.0
        if not self.is_known:
            return work.num_new * self._first_rate
        _, per_token, per_pair, _, _ = self._fit.coefficients
        return per_token * work.num_new + per_pair * work.pairs


Array = npt.NDArray[np.float64]

NUM_KINDS = 64  # kinds differ by a factor of 4 in some feature; a server shows a dozen or two
PER_KIND = 8  # latest samples of each; a median of 8 bears three outliers
# After this many samples of others, a sample counts half: a clock that was throttled an hour
# ago says little, but more than nothing, about lengths not seen since.
HALF_LIFE = 2000
SEED_DOUBT = 0.3  # another driver, clock or neighbour moves a calibrated cost by about this part
REFUTED = 4.0  # standard errors between what samples say alone and a seed, and it was a wrong one
FLAT = 0.05  # relative deviations below it are noise, not reason to weigh one sample less
ROUNDS = 3  # of reweighting; it starts from the last fit, so it is nearly there


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
        self._seed: Array = np.zeros(num_features)
        self._num_added = self._next_fit = 0
        self.coefficients: tuple[float, ...] = (0.0,) * num_features
        self.is_seeded = False

    def seed(self, coefficients: Sequence[float]) -> None:
        """Start from known costs, finite and not negative."""
        self.is_seeded = True
        self._seed = np.asarray(coefficients, dtype=np.float64)
        self.coefficients = tuple(float(c) for c in coefficients)
        if self._num_added:
            self.fit()

    def add(self, features: Sequence[float], seconds: float) -> None:
        """One observation: `features` (all >= 0) took `seconds`. Nonsense is left out."""
        if not 0.0 < seconds < math.inf:
            return
        kind = tuple((math.frexp(feature)[1] + 1) >> 1 for feature in features)
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
        """Fit all samples kept; `add` does it by itself often enough while serving."""
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
                doubt = self._doubt(x / predicted[:, None], seconds / predicted, weight)
                for _ in range(ROUNDS):
                    solution = self._solve(
                        x / predicted[:, None], seconds / predicted, weight, doubt
                    )
                    fitted = x @ solution
                    predicted = np.where(fitted > 0.0, fitted, seconds)
                    weight = recent / np.maximum(np.abs(seconds / predicted - 1.0), FLAT)
        except (np.linalg.LinAlgError, FloatingPointError):  # beyond what floats tell apart
            return
        self.coefficients = tuple(solution.tolist())

    def _doubt(self, x: Array, y: Array, weight: Array) -> Array:
        """By how much each seed may be wrong: a part of it, unless the samples alone refute it.

        A seed that is a hundred times too low would otherwise be a hundred times too sure.
        """
        doubt = SEED_DOUBT * self._seed
        num_spare = len(y) - len(doubt)
        if num_spare < 1 or not doubt.any():
            return doubt
        a, b, ridge = _normal(x, y, weight)
        root = np.sqrt(a.diagonal() + ridge)
        inverse = np.linalg.inv((a + np.diag(ridge)) / np.outer(root, root)) / np.outer(root, root)
        alone = inverse @ b
        squares = float(weight @ (y - x @ alone) ** 2) / weight.sum() * len(y)
        noise = max(FLAT, math.sqrt(squares / num_spare))
        off = np.abs(alone - self._seed)
        error = np.hypot(noise * np.sqrt(np.maximum(inverse.diagonal(), 0.0)), doubt)
        return np.where(off > REFUTED * error, off, doubt)

    def _solve(self, x: Array, y: Array, weight: Array, doubt: Array) -> Array:
        """Weighted least squares, drawn to the seed; what falls below 0 is 0."""
        a, b, pull = _normal(x, y, weight)
        # As much as a sample with FLAT of noise weighs against a seed with its doubt.
        seeded = doubt > 0.0
        pull[seeded] = (FLAT / doubt[seeded]) ** 2
        a = a + np.diag(pull)
        b = b + pull * self._seed
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


def _normal(x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """The normal equations, and a ridge just enough to solve them where features rise and fall
    together. Weights come to 1 on average."""
    weight = weight / weight.sum() * len(weight)
    weighted = x * weight[:, None]
    a, b = x.T @ weighted, y @ weighted
    scale = a.diagonal() / len(weight)
    return a, b, np.where(scale > 0.0, 1e-6 * scale, 1.0)
