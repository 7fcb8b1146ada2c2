"""InferCept: the least waste of preserve, swap and discard (ICML 2024).

Waste is VRAM that is held and computes nothing, in block-seconds. With B blocks of the turn and
C blocks of the turns that run beside it:

    preserve = expected pause * B           they lie there until the program is back
    swap     = 2 * load_s * B               out, in; copies do not stop the others
    discard  = prefill_s * (B + C)          all wait while they are computed again

Original copies stop the batch and cost 2 * load_s * (B + C); Continuum compares itself with the
form above, "since the CPU offloading is non-blocking" (section 6.1), and so do we. There is no
term for the queue that a turn without blocks stands in, and no TTL: preserve lasts until the
program is back, here until max_ttl_s. The pause is the forecast's, not a profile made offline.
"""

from __future__ import annotations

from continuum_connector.policy.base import (
    Choice,
    Decision,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    Unpriced,
    let_go,
)


class Infercept(Unpriced):
    """Take what wastes least; of two that waste the same, what keeps less."""

    name = "infercept"
    orders = False
    reads = True

    def __init__(self, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        if (over := let_go(turn)) is not None:
            return over
        used = snapshot.num_blocks - snapshot.num_free_blocks - snapshot.num_pinned_blocks
        running = max(turn.num_blocks, used)  # this turn's blocks are not free yet
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
