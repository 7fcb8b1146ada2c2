"""Hindsight prices as the policies do: one who knows the gaps has next to no regret."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from continuum_connector.forecast import Forecast
from continuum_connector.policy.adaptive import FORESEEN, HOLD_S, Adaptive
from continuum_connector.policy.base import After, Decision, FinishedTurn, Offload, Pin, Snapshot
from continuum_connector.programs.program import Hints

MAX_TTL_S = 1e5


def worlds(dice: random.Random) -> tuple[FinishedTurn, Snapshot]:
    blocks = dice.randint(10, 4000)
    prefill_s = dice.choice([0.1, 1.0, 20.0])
    turn = FinishedTurn(
        program="p",
        turn=1,
        num_tokens=16 * blocks,
        num_blocks=blocks,
        hints=Hints(),
        prefill_s=prefill_s,
        load_s=prefill_s * dice.choice([0.05, 0.5, 2.0]),
    )
    world = Snapshot(
        now=0.0,
        num_blocks=10_000,
        num_free_blocks=0,
        num_pinned_blocks=0,
        num_waiting=dice.choice([0, 3, 40]),
        has_tier=True,
        num_running=dice.choice([0, 5]),
        mean_blocks=dice.choice([100.0, 1000.0]),
        price=dice.choice([0.0, 1e-5, 1e-3]),
        residence_s=dice.choice([1.0, 60.0, 3600.0]),
    )
    return turn, world


def regret(turn: FinishedTurn, world: Snapshot, decision: Decision, gap_s: float | None) -> float:
    """Seconds that a decision lost once its program came back after `gap_s` seconds (None: never):
    what the best would have been worth less what it was worth itself, both in net seconds that all
    programs together gain, by the formulas of policy/adaptive.py with certainty instead of chances:

        free            0
        offload         k * max(0, N * prefill - load)   if back while DRAM has it, else 0
        pin of TTL t    k * N * prefill - price * blocks * gap                 if back within t
                        -price * blocks * t, plus the offload it was a part of, if not
        the best pin    the one whose TTL is the gap

    k = blocks / mean blocks of a turn, N = turns that a prefill delays.
    """
    gap = math.inf if gap_s is None else gap_s
    weight = turn.num_blocks / world.mean_blocks
    prefill_s = turn.prefill_s * (1 + world.num_waiting + world.num_running)
    cost = world.price * turn.num_blocks  # per second
    stored = weight * max(0.0, prefill_s - turn.load_s) if gap <= world.residence_s else 0.0

    def pinned(ttl_s: float, copy: float) -> float:
        if math.isinf(gap) and math.isinf(ttl_s):
            return -math.inf  # an endless pin for nobody
        return weight * prefill_s - cost * gap if gap <= ttl_s else copy - cost * ttl_s

    best = max(0.0, stored, pinned(gap, 0.0))
    if isinstance(decision, Pin):
        return best - pinned(decision.ttl_s, stored if decision.then is After.STORE else 0.0)
    return best - (stored if isinstance(decision, Offload) else 0.0)


@pytest.mark.parametrize("seed", range(300))
def test_who_knows_the_gap_has_no_regret_beyond_the_grid(seed: int) -> None:
    dice = random.Random(seed)
    turn, world = worlds(dice)
    gap_s = dice.choice([None, 0.5, 5.0, 50.0, 500.0, 5000.0])
    gap = Forecast.never() if gap_s is None else Forecast.known(gap_s)
    knowing = msgspec.structs.replace(turn, gap=gap)
    decision = Adaptive(MAX_TTL_S).decide(knowing, world).decision
    regret_s = regret(turn, world, decision, gap_s)
    # Its forecast knows a gap to a fifth, and it holds nothing for less than holding takes.
    # Nor does it keep what is not worth FORESEEN, where nobody came to wait in the end.
    grid = 0.2 * world.price * turn.num_blocks * (gap_s or 0.0)
    foreseen = 1.2 * FORESEEN * turn.num_blocks / world.mean_blocks * (gap_s or 0.0)
    assert -1e-9 <= regret_s <= grid + foreseen + HOLD_S * turn.num_blocks
