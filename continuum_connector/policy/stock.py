"""Stock: keep nothing beyond what vLLM's own prefix cache keeps. The neutral baseline."""

from __future__ import annotations

from continuum_connector.policy.base import Choice, FinishedTurn, Free, Snapshot, Unpriced


class Stock(Unpriced):
    """Free every turn and leave vLLM's order: what a server without us does."""

    name = "stock"
    orders = False
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        return Choice(Free(), "policy is stock")
