"""Stock: keep nothing beyond what vLLM's own prefix cache keeps. The neutral baseline."""

from __future__ import annotations

from continuum_connector.policy.base import Decision, FinishedTurn, Free, Snapshot


class Stock:
    """Free every turn, so that only program order is left of us."""

    name = "stock"

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> tuple[Decision, str]:
        return Free(), "policy is stock"
