"""ContextServe: tools are fast, slow or uncertain, and each kind is treated in its own way.

From the execution note of vllm-continuum, section 10.4: a fast tool (`ls`) pins for 3 s, a slow
one (`pip install`) frees at once, for all others a Normal-Inverse-Gamma posterior over the
logarithm of the tool's gaps gives the TTL at a quantile; with nothing known of the tool,
Continuum's rule decides. The note does not give the prior nor the quantile: the prior here is
worth one call of 1 s, and the TTL is what 90 % return within. The posterior predictive is used
instead of a Thompson sample, since a decision is a function of its arguments; the note's
fallback of gradient-boosted trees is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    Unpriced,
    let_go,
)
from continuum_connector.policy.continuum import Continuum
from continuum_connector.toolcalls.asked import ToolCall

FAST = (
    *("ls", "cat", "pwd", "head", "tail", "wc", "echo", "which", "stat", "file", "sed", "grep"),
    *("cd", "mkdir", "git status", "git diff", "git log", "git branch"),
)
SLOW = (
    *("make", "pytest", "tox", "pip install", "conda install", "npm install", "npm test"),
    *("docker build", "docker pull", "cargo build", "cargo test", "apt-get install"),
)
FAST_TTL_S = 3.0
QUANTILE = 0.9
MIN_TTL_S = 0.01  # a shorter pin is none
MAX_GAPS = 128  # of more, every n-th: they ascend, so their shape stays, and decisions are quick
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
        if (over := let_go(turn)) is not None:
            return over
        calls = turn.asked.calls
        if any(_is_one_of(call, SLOW) for call in calls):
            return self._let_go(snapshot, "a slow tool")
        if calls and all(_is_one_of(call, FAST) for call in calls):
            return self._pin(FAST_TTL_S, snapshot, "a fast tool")
        if not turn.tool_gaps:
            return self._continuum.decide(turn, snapshot)
        ttl_s = return_quantile(turn.tool_gaps, QUANTILE)
        why = f"{QUANTILE:.0%} of its calls are expected back within {ttl_s:.3g} s"
        if MIN_TTL_S < ttl_s <= self._max_ttl_s:
            return self._pin(ttl_s, snapshot, why)
        return self._let_go(snapshot, why)

    def _pin(self, ttl_s: float, snapshot: Snapshot, why: str) -> Choice:
        then = After.STORE if snapshot.has_tier else After.DROP
        return Choice(Pin(min(ttl_s, self._max_ttl_s), then), why)

    def _let_go(self, snapshot: Snapshot, why: str) -> Choice:
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


def _is_one_of(call: ToolCall, commands: Sequence[str]) -> bool:
    said = f"{call.name} {call.arguments} "
    return any(said.startswith(f"{command} ") for command in commands)
