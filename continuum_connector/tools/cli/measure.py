"""What `continuum calibrate` sends, and how it evaluates the times that come back."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from continuum_connector.costs.costs import Costs
from continuum_connector.costs.fit import RobustFit
from continuum_connector.tools.cli.server import CommandError, Server

FIRST_ID, LAST_ID = 10, 999  # ordinary tokens in every vocabulary, hardly ever special ones
SHORTEST = 32  # tokens; a shorter prompt costs nothing but overhead
PREFILL = "vllm:request_prefill_time_seconds"
VRAM_HITS = "vllm:prefix_cache_hits_total"
MIN_POINTS = 3  # base, per token, per pair


@dataclass
class Point:
    """A prompt of `num_new` tokens behind `num_cached` ones, sent several times."""

    num_new: int
    num_cached: int
    ttft_s: list[float] = field(default_factory=list)  # as the client sees it
    prefill_s: list[float] = field(default_factory=list)  # as the engine says, if it does

    @property
    def seconds(self) -> float:
        """The median of the engine's own measurements; of the TTFTs if there are none."""
        return statistics.median(self.prefill_s or self.ttft_s)


def default_lengths(max_model_len: int) -> list[int]:
    """Lengths that double, from 1000 tokens (less for a short context) to the longest prompt."""
    longest = (max_model_len or 32768) - 2  # one token comes out
    lengths = [max(SHORTEST, min(1000, longest // 8))]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    return lengths


def plan(lengths: Sequence[int]) -> list[Point]:
    """Each length without a prefix, then the shortest length behind prefixes that add up to
    each."""
    ordered = sorted(set(lengths))
    new = ordered[0]
    return [Point(n, 0) for n in ordered] + [Point(new, n - new) for n in ordered if n >= 2 * new]


class Prober:
    """Sends prompts that no cache knows, apart from the prefixes that are meant to be cached."""

    def __init__(self, server: Server, model: str, repeats: int) -> None:
        self._server = server
        self._model = model
        self._repeats = repeats
        self._random = random.SystemRandom()
        metrics = server.metrics()
        self.has_connector = "continuum:programs" in metrics
        self.num_others = int(metrics.get("vllm:num_requests_running", 0))
        self._extra: dict[str, Any] = {}
        if self.has_connector:  # a program with a TTL of 0, so that nothing is kept for it
            program = f"calibrate-{self._random.getrandbits(48):x}"
            self._extra = {"kv_transfer_params": {"continuum": {"program": program, "ttl_s": 0}}}

    def warm_up(self, num_tokens: int) -> None:
        """Send one prompt that does not count, because the first may compile kernels."""
        self._send(self._tokens(num_tokens))

    def measure(self, point: Point, on_sent: Callable[[], None]) -> bool:
        """Fill in `point`; False if its prefix was not found in the cache."""
        prefix = self._tokens(point.num_cached)
        if prefix:
            self._send(prefix)
        num_hits = 0.0
        for _ in range(self._repeats):
            ttft_s, prefill_s, hits = self._send(prefix + self._tokens(point.num_new))
            point.ttft_s.append(ttft_s)
            point.prefill_s += [prefill_s] if prefill_s else []
            num_hits += hits
            on_sent()
        if len(point.prefill_s) < len(point.ttft_s):
            point.prefill_s.clear()  # one median must not mix two kinds of measurement
        return num_hits >= 0.5 * point.num_cached * self._repeats

    def _send(self, tokens: list[int]) -> tuple[float, float | None, float]:
        """Return TTFT, the engine's prefill seconds, and tokens found in VRAM."""
        before = self._server.metrics()
        ttft_s = self._server.first_token_s(self._model, tokens, self._extra)
        for _ in range(5):  # the answer may arrive before the server has counted it
            after = self._server.metrics()
            if after.get(f"{PREFILL}_count", 0.0) > before.get(f"{PREFILL}_count", 0.0):
                break

        def added(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        alone = added(f"{PREFILL}_count") == 1.0
        hits = added(VRAM_HITS) if VRAM_HITS in after else float(len(tokens))
        return ttft_s, max(0.0, added(f"{PREFILL}_sum")) if alone else None, hits

    def _tokens(self, num: int) -> list[int]:
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(num)]


def fit(points: Sequence[Point], chunk: int) -> list[float]:
    """Return the coefficients of PrefillModel that fit the points' medians.

    `chunk`: tokens per step of that server, 0 if unknown; then the cost per token of long prompts
    includes a step's base. The cost of generating is not measured: it is 0, and learned later.
    """
    if len(points) < MIN_POINTS:
        raise CommandError(
            f"{len(points)} lengths were measured and a fit takes {MIN_POINTS}, so nothing was "
            "written; give more --lengths, or let it run longer"
        )
    model = RobustFit(3)
    for point in points:
        model.add(features(point, chunk), point.seconds)
    model.fit()
    return [*model.coefficients, 0.0, 0.0]


def features(point: Point, chunk: int) -> tuple[float, float, float]:
    """Steps, tokens and pairs of a prompt, which the coefficients multiply."""
    num_steps = -(-point.num_new // chunk) if chunk else 1
    pairs = point.num_new * (point.num_cached + point.num_new / 2)
    return float(num_steps), float(point.num_new), pairs


def fitted(point: Point, coefficients: Sequence[float], chunk: int) -> float:
    """Seconds that the fit predicts for a point."""
    terms = zip(coefficients, features(point, chunk), strict=False)
    return sum(cost * amount for cost, amount in terms)


def load_coefficients(metrics: dict[str, float]) -> list[float] | None:
    """The coefficients of a load, from the connector's own transfers; None before the first."""
    blocks = metrics.get("continuum:loaded_blocks_total", 0.0)
    seconds = metrics.get("continuum:load_seconds_sum", 0.0)
    return [0.0, seconds / blocks] if blocks > 0.0 and seconds > 0.0 else None


def costs_state(prefill: list[float], load: list[float] | None) -> dict[str, list[float]]:
    """The `costs` part of a state file."""
    costs = Costs(1)
    costs.restore({"prefill": prefill, **({"load": load} if load else {})})
    return costs.state()


def rows(
    points: Sequence[Point], coefficients: Sequence[float], chunk: int
) -> Iterator[tuple[str, ...]]:
    """The table's cells: tokens, cached, TTFT, prefill, fitted, error."""
    for point in points:
        guess = fitted(point, coefficients, chunk)
        prefill = f"{statistics.median(point.prefill_s):.4g} s" if point.prefill_s else "not told"
        yield (
            f"{point.num_new:,}",
            f"{point.num_cached:,}",
            f"{statistics.median(point.ttft_s):.4g} s",
            prefill,
            f"{guess:.4g} s",
            f"{100 * (guess / point.seconds - 1):+.1f} %",
        )
