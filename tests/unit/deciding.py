"""Finished turns, snapshots and forecasts for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from continuum_connector.forecast import EDGES, Forecast
from continuum_connector.policy.base import FinishedTurn, Snapshot
from continuum_connector.programs.program import Hints


def finished(num_blocks: int = 10, hints: Hints | None = None, **known: Any) -> FinishedTurn:
    return FinishedTurn("p", 3, num_blocks * 16, num_blocks, hints or Hints(), **known)


def world(has_tier: bool = False, **known: Any) -> Snapshot:
    """An otherwise idle server with room, unless said otherwise."""
    known = {"mean_blocks": 10.0, "num_waiting": 0} | known
    return Snapshot(
        100.0,
        num_blocks=1000,
        num_free_blocks=500,
        num_pinned_blocks=100,
        has_tier=has_tier,
        **known,
    )


def curve(points: Sequence[tuple[float, float]]) -> Forecast:
    """A forecast that is linear between `points` of (seconds, share back by then)."""
    cdf, known = [], [(0.0, 0.0), *points]
    for edge in EDGES:
        after = next((i for i, (t, _) in enumerate(known) if t >= edge), None)
        if after is None:
            cdf.append(known[-1][1])
            continue
        (t0, p0), (t1, p1) = known[after - 1], known[after]
        cdf.append(p0 + (p1 - p0) * (edge - t0) / (t1 - t0))
    return Forecast(cdf, 100.0)


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """Any distribution, with any share that never returns; mostly few, sharp steps."""
    steps = draw(
        st.dictionaries(st.integers(0, len(EDGES) - 1), st.floats(0.001, 1), min_size=0, max_size=8)
    )
    share = draw(st.floats(0, 1)) / max(sum(steps.values()), 1e-9)
    total, cdf = 0.0, []
    for index in range(len(EDGES)):
        total += steps.get(index, 0.0) * share
        cdf.append(min(total, 1.0))
    return Forecast(cdf, 10.0)
