"""The connector, to whose disk a read is always worth its time, and whose disk always has room.

Where prefill is as fast as the disk, and the tiny model's often is, nothing would be read, and so
nothing seen; on a machine whose drive is nearly full there would be no disk tier at all. A disk
slot has two blocks (disks.py).
"""

from __future__ import annotations

from bench.serve.tiny_model import LLAMA
from continuum_connector.connector import ContinuumConnector as ContinuumConnector
from continuum_connector.costs import Costs
from continuum_connector.worker import disk

Costs.knows_prefill = property(lambda self: False)  # type: ignore[assignment, method-assign]
disk.MIN_LEFT = 0.0  # type: ignore[misc]
disk.SLOT_BYTES, disk.DRAM_SHARE = 2 * 32 * LLAMA.kv_bytes_per_token(), 1  # of 32 tokens each
