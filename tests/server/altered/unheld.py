"""The connector, with the fault that `test_lifetime` must find: while the file TEST_FAULT_FILE
is there, stores hold nothing, so vLLM may give their blocks to others before they are copied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from continuum_connector import build
from continuum_connector.connector import ContinuumConnector as ContinuumConnector
from continuum_connector.messages import BlockIds
from continuum_connector.scheduler.holds import Hold, HoldTable


class UnheldTable(HoldTable):
    """Holds as its base does; while there is the fault, it lets go at once."""

    def take(self, blocks: Sequence[Any], ids: BlockIds | None = None) -> Hold:
        hold = super().take(blocks, ids)
        if os.path.exists(os.environ["TEST_FAULT_FILE"]):
            super().release(hold)
        return hold

    def release(self, hold: Hold) -> None:
        if not hold.released:
            super().release(hold)


build.HoldTable = UnheldTable  # type: ignore[misc]  # of stores; pins have their own
