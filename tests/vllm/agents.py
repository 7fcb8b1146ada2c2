"""AgentEngine: the harness with our connector, driven by turns, its books checked every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from continuum_connector.metric_table import PIN_CAUSES
from tests.vllm.harness import Engine


class AgentEngine(Engine):
    """After each step: held + free == total, every foreign reference is ours, pins balance."""

    def __init__(self, num_blocks: int = 100, **kwargs: Any) -> None:
        super().__init__(num_blocks, **kwargs)
        self.side = self.connector.side

    def run_turn(self, request_id: str, tokens: list[int] | int, **kwargs: Any) -> float:
        """Run one turn to its end, and any other that is there; return when it ended."""
        self.add(request_id, tokens, **kwargs)
        self.run_until_idle()
        assert request_id in self.finish_reasons, self.describe()
        return self.clock()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def check(self) -> None:
        super().check()
        if getattr(self, "side", None) is None:
            return
        ours: Counter[int] = Counter()
        for holds in (self.side.retention.holds, self.side.store_holds):
            holds.check()
            for block in np.nonzero(holds._refs)[0]:
                ours[int(block)] += int(holds._refs[block])
        assert ours == self.foreign_refs(), "a reference that neither a request nor we own"
        started, ended = self.total("pins_started"), sum(self.ends().values())
        assert started == ended + len(self.side.pins), "a pin ended without a cause, or twice"

    # --- what the metrics say -------------------------------------------------------------
    def total(self, name: str, label: str | None = None) -> int:
        return int(self.connector.account.total(name, label))

    def ends(self) -> dict[str, int]:
        """How many pins ended by which cause; causes that did not occur are left out."""
        counts = {cause: self.total("pins_ended", cause) for cause in PIN_CAUSES}
        return {cause: n for cause, n in counts.items() if n}

    def num_pins(self) -> int:
        return len(self.side.pins)

    def pinned_blocks(self) -> int:
        return int(self.side.retention.holds.num_blocks)
