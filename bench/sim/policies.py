"""Other papers' rules, and an oracle: policies for the lab, not for servers.

Infercept: the least waste of preserve, swap and discard (ICML 2024). Waste is VRAM that is held and
computes nothing, in block-seconds. With B blocks of the turn and C blocks of the turns that run
beside it:

    preserve = expected pause * B           they lie there until the program is back
    swap     = 2 * load_s * B               out, in; copies do not stop the others
    discard  = prefill_s * (B + C)          all wait while they are computed again

Original copies stop the batch and cost 2 * load_s * (B + C); Continuum compares itself with the
form above, "since the CPU offloading is non-blocking" (section 6.1), and so do we. There is no
term for the queue that a turn without blocks stands in, and no TTL: preserve lasts until the
program is back, here until max_ttl_s. The pause is the forecast's, not a profile made offline.

ContextServe: tools are fast, slow or uncertain, and each kind is treated in its own way. From the
execution note of vllm-continuum, section 10.4: a fast tool (`ls`) pins for 3 s, a slow
one (`pip install`) frees at once, for all others a Normal-Inverse-Gamma posterior over the
logarithm of the tool's gaps gives the TTL at a quantile; with nothing known of the tool,
Continuum's rule decides. The note does not give the prior nor the quantile: the prior here is
worth one call of 1 s, and the TTL is what 90 % return within. The posterior predictive is used
instead of a Thompson sample, since a decision is a function of its arguments; the note's
fallback of gradient-boosted trees is left out.

Oracle: adaptive with the forecast of one who knows. What adaptive loses against it is what better
forecasts could still gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from msgspec.structs import replace

from continuum_connector.forecast.forecast import Forecast
from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import (
    After,
    Choice,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Resident,
    Snapshot,
    Unpriced,
    must_free,
)
from continuum_connector.policy.continuum import Continuum


class Infercept(Unpriced):
    """Take the alternative that wastes least; among equals, the one that keeps less."""

    name = "infercept"
    orders = False
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        used = snapshot.num_blocks - snapshot.num_free_blocks - snapshot.num_pinned_blocks
        running = max(turn.num_blocks, used)  # at least this turn's blocks, which are not free yet
        pause_s = turn.gap.held(self._max_ttl_s)
        waste = {"free": turn.prefill_s * running, "pin": pause_s * turn.num_blocks}
        if snapshot.has_tier:
            waste["offload"] = 2.0 * turn.load_s * turn.num_blocks
        decisions: dict[str, Decision] = {
            "free": Free(),
            "offload": Offload(),
            "pin": Pin(self._max_ttl_s),
        }
        name = min((n for n in decisions if n in waste), key=waste.__getitem__)
        average = max(snapshot.mean_blocks, 1.0)
        values = {other: (waste["free"] - wasted) / average for other, wasted in waste.items()}
        listed = ", ".join(f"{n} {wasted:.3g}" for n, wasted in waste.items())
        return Choice(decisions[name], f"least waste in block-seconds: {listed}", values)


# The note also lists subcommands (`git log`, `pip install`); for us, a tool is a command.
FAST = frozenset(
    [
        *("ls", "cat", "pwd", "head", "tail", "wc", "echo", "which", "stat", "file", "sed", "grep"),
        *("cd", "mkdir", "git"),
    ]
)
SLOW = frozenset(("make", "pytest", "tox", "pip", "conda", "npm", "docker", "cargo", "apt-get"))
FAST_TTL_S = 3.0
QUANTILE = 0.9
MIN_TTL_S = 0.01  # a shorter pin is useless
MAX_GAPS = 128  # of more, take every n-th: sorted, they keep their shape, and decisions are quick
MEAN, CALLS, SHAPE, SCALE = (
    0.0,
    1.0,
    2.0,
    1.0,
)  # the prior over ln(gap / 1 s): mu, kappa, alpha, beta


class ContextServe(Unpriced):
    """Pin fast tools, let slow ones go, ask the posterior about the rest."""

    name = "contextserve"
    orders = True
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s
        self._continuum = Continuum(max_ttl_s)

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (freed := must_free(turn)) is not None:
            return freed
        tools = set(turn.asked.tools)
        if tools & SLOW:
            return self._not_pinned(snapshot, "a slow tool")
        if tools and tools <= FAST:
            return self._pin(FAST_TTL_S, snapshot, "a fast tool")
        if not turn.tool_gaps:
            return self._continuum.decide(turn, snapshot)
        ttl_s = return_quantile(turn.tool_gaps, QUANTILE)
        why = f"{QUANTILE:.0%} of its calls are expected back within {ttl_s:.3g} s"
        if MIN_TTL_S < ttl_s <= self._max_ttl_s:
            return self._pin(ttl_s, snapshot, why)
        return self._not_pinned(snapshot, why)

    def _pin(self, ttl_s: float, snapshot: Snapshot, why: str) -> Choice:
        then = After.STORE if snapshot.has_tier else After.DROP
        return Choice(Pin(min(ttl_s, self._max_ttl_s), then), why)

    def _not_pinned(self, snapshot: Snapshot, why: str) -> Choice:
        return Choice(Offload() if snapshot.has_tier else Free(), why)


def return_quantile(gaps: Sequence[float], q: float) -> float:
    """The time in seconds within which the next call returns with probability `q`.

    The posterior predictive of a normal with unknown mean and variance is Student's t with
    2 * alpha degrees of freedom (Murphy 2007, "Conjugate Bayesian analysis of the Gaussian
    distribution", section 3); 4 or more here, which the expansion below is good for.
    """
    thinned = gaps[:: len(gaps) // MAX_GAPS + 1]
    logs = [math.log(max(gap, 1e-3)) for gap in thinned]
    n, total = len(logs), math.fsum(logs)
    mean = total / n if n else MEAN
    squares = math.fsum((x - mean) ** 2 for x in logs)
    calls, shape = CALLS + n, SHAPE + n / 2
    centre = (CALLS * MEAN + total) / calls
    scale = SCALE + squares / 2 + CALLS * n * (mean - MEAN) ** 2 / (2 * calls)
    width = math.sqrt(scale * (calls + 1) / (shape * calls))
    return math.exp(centre + width * student_quantile(q, 2 * shape))


def student_quantile(q: float, degrees: float) -> float:
    """Student's t at `q`, by its expansion around the normal (Abramowitz and Stegun, 26.7.5).

    Within 0.5 % for 4 degrees of freedom or more and q up to 0.95.
    """
    x = NormalDist().inv_cdf(q)
    return (
        x
        + (x**3 + x) / (4 * degrees)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * degrees**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * degrees**3)
    )


# Program, now -> seconds until its next turn arrives, None if there is none. Called when a turn
# ends or during the pause after it. Raises LookupError if nobody knows.
Away = Callable[[str, float], float | None]


class Oracle(Adaptive):
    """Values everything as adaptive does, with the true gap in place of its forecast.

    If nobody knows the true gap, as for a program that does not name itself, it is adaptive.
    """

    name = "oracle"

    def __init__(self, away: Away, max_ttl_s: float) -> None:
        super().__init__(max_ttl_s)
        self._away = away

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        try:
            gap_s = self._away(turn.program, snapshot.now)
        except LookupError:
            return super().decide(turn, snapshot)
        gap = Forecast.never() if gap_s is None else Forecast.known(gap_s)
        return super().decide(replace(turn, gap=gap), snapshot)

    def dram_rank(self, resident: Resident, now: float) -> float:
        """As adaptive's; the blocks of a program that is not coming back are worth nothing."""
        if resident.is_waiting:
            return super().dram_rank(resident, now)
        try:
            away_s = self._away(resident.program, now)
        except LookupError:
            return super().dram_rank(resident, now)
        return float("-inf") if away_s is None else -away_s - resident.queueing_s
