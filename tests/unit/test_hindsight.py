"""Hindsight prices as the policies do: one who knows the gaps has next to no regret."""

from __future__ import annotations

import random

import msgspec
import pytest

from continuum_connector.forecast import Forecast
from continuum_connector.policy.adaptive import FORESEEN, HOLD_S, Adaptive
from continuum_connector.policy.base import FinishedTurn, Pin, Snapshot, name_of
from continuum_connector.programs.program import Hints
from continuum_connector.tools.analysis.summary import regret

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


@pytest.mark.parametrize("seed", range(300))
def test_who_knows_the_gap_has_no_regret_beyond_the_grid(seed: int) -> None:
    dice = random.Random(seed)
    turn, world = worlds(dice)
    gap_s = dice.choice([None, 0.5, 5.0, 50.0, 500.0, 5000.0])
    gap = Forecast.never() if gap_s is None else Forecast.known(gap_s)
    knowing = msgspec.structs.replace(turn, gap=gap)
    decision = Adaptive(MAX_TTL_S).decide(knowing, world).decision
    judged = regret(
        {
            "decision": name_of(decision),
            "ttl_s": decision.ttl_s if isinstance(decision, Pin) else None,
            "then": decision.then.value if isinstance(decision, Pin) else None,
            "blocks": turn.num_blocks,
            "known": {
                "prefill": turn.prefill_s,
                "load": turn.load_s,
                "price": world.price,
                "mean_blocks": world.mean_blocks,
                "waiting": world.num_waiting,
                "running": world.num_running,
                "vram_blocks": world.num_blocks,
                "residence": world.residence_s,
            },
        },
        gap_s,
    )
    assert judged is not None
    regret_s, _, _ = judged
    # Its forecast knows a gap to a fifth, and it holds nothing for less than holding takes.
    # Nor does it keep what is not worth FORESEEN, where nobody came to wait in the end.
    grid = 0.2 * world.price * turn.num_blocks * (gap_s or 0.0)
    foreseen = 1.2 * FORESEEN * turn.num_blocks / world.mean_blocks * (gap_s or 0.0)
    assert 0.0 <= regret_s <= grid + foreseen + HOLD_S * turn.num_blocks
