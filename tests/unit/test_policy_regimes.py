"""What adaptive does in each regime: one table, to be judged by a person.

Gaps: fast tools as in the paper's Table 2 (mean 0.9 s, a long tail), coding sessions and people
as measured on Claude Code. A third of the people never come back, and of one-shot
requests all but 1 %. Contexts: 4K tokens of a small model, 104K of an 8B model; buses of 50 and
6 GB/s. Under pressure one average turn waits for the room and two run. Without pressure agents
stay where they are and nobody is pinned in vain: neither one-shot requests, whatever they cost to
compute, nor people whose contexts cost next to nothing.
"""

from __future__ import annotations

import itertools
import math

from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import Choice, Pin
from tests.unit.deciding import curve, finished, world

GAPS = {
    "fast tool": [(0.1, 0.05), (0.3, 0.4), (0.6, 0.7), (1, 0.82), (2, 0.92), (10, 0.98), (60, 1)],
    "coding": [(2, 0.012), (5, 0.27), (10, 0.58), (15, 0.7), (30, 0.82), (60, 0.88), (300, 0.97)],
    "person": [(16, 0.07), (40, 0.17), (127, 0.33), (409, 0.5), (1543, 0.6), (3088, 0.63)],
    "one-shot": [(60, 0.01), (86400, 0.02)],
}
# Seconds to compute, to load at 50 and at 6 GB/s
CONTEXTS = {"4K, small": (0.05, 0.011, 0.09), "104K, 8B": (7.0, 0.27, 2.3)}
NO_PRESSURE: dict[str, float] = {}
PRESSURE = {"price": 1 / 500, "num_waiting": 1, "num_running": 2}

TABLE = """
gap        context    bus       no pressure       ... no DRAM       pressure          ... no DRAM
fast tool  4K, small  50 GB/s   pin 10 s, store   pin 58 s          offload           free
fast tool  4K, small  6 GB/s    pin 58 s          pin 58 s          offload           free
fast tool  104K, 8B   50 GB/s   pin 58 s, store   pin 58 s          offload           pin 58 s
fast tool  104K, 8B   6 GB/s    pin 58 s, store   pin 58 s          pin 2.2 s, store  pin 58 s
coding     4K, small  50 GB/s   offload           pin 29 s          offload           free
coding     4K, small  6 GB/s    pin 29 s          pin 29 s          offload           free
coding     104K, 8B   50 GB/s   pin 58 s, store   pin 58 s          offload           pin 17 s
coding     104K, 8B   6 GB/s    pin 58 s, store   pin 58 s          offload           pin 17 s
person     4K, small  50 GB/s   offload           free              offload           free
person     4K, small  6 GB/s    free              free              offload           free
person     104K, 8B   50 GB/s   pin 41 s, store   pin 58 s          offload           free
person     104K, 8B   6 GB/s    pin 58 s, store   pin 58 s          offload           free
one-shot   4K, small  50 GB/s   offload           free              offload           free
one-shot   4K, small  6 GB/s    free              free              offload           free
one-shot   104K, 8B   50 GB/s   offload           free              offload           free
one-shot   104K, 8B   6 GB/s    offload           free              offload           free
"""


def in_short(choice: Choice) -> str:
    decision = choice.decision
    if isinstance(decision, Pin):
        return f"pin {decision.ttl_s:.2g} s" + (", store" * (decision.then.value == "store"))
    return type(decision).__name__.lower()


def test_what_adaptive_does_in_each_regime() -> None:
    policy, rows = Adaptive(60.0), [TABLE.strip().splitlines()[0]]
    for gap, context, bus in itertools.product(GAPS, CONTEXTS, ("50 GB/s", "6 GB/s")):
        prefill_s, *loads = CONTEXTS[context]
        cells = []
        for world_is, has_tier in itertools.product((NO_PRESSURE, PRESSURE), (True, False)):
            turn = finished(
                500,
                gap=curve(GAPS[gap]),
                prefill_s=prefill_s,
                load_s=loads[bus == "6 GB/s"] if has_tier else math.inf,
            )
            snapshot = world(has_tier, mean_blocks=500.0, **world_is)
            cells.append(in_short(policy.decide(turn, snapshot)))
        listed = "".join(f"{cell:<18}" for cell in cells).rstrip()
        rows.append(f"{gap:<11}{context:<11}{bus:<10}{listed}")
    assert "\n".join(rows) == TABLE.strip()
