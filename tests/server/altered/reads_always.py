"""The connector, to which a read from disk is always worth its time.

Where prefill is as fast as the disk, and the tiny model's often is, nothing would be read, and so
nothing seen.
"""

from __future__ import annotations

from continuum_connector.connector import ContinuumConnector as ContinuumConnector
from continuum_connector.costs.costs import Costs

Costs.knows_prefill = property(lambda self: False)  # type: ignore[assignment, method-assign]
