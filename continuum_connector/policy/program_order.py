"""Program order: keep nothing, but serve waiting turns by the arrival of their programs.

The larger part of what Continuum gains (its section 4.3); what retention adds is measured
against this policy, not against stock vLLM.
"""

from __future__ import annotations

from continuum_connector.policy.base import Choice, FinishedTurn, Free, Snapshot, Unpriced


class ProgramOrder(Unpriced):
    """Free every turn; only the order of the waiting ones differs from stock vLLM."""

    name = "program_order"
    orders = True
    reads = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        return Choice(Free(), "policy is program_order")
