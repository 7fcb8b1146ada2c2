"""The connector, with the fault that `test_rollouts` must find: while the file TEST_FAULT_FILE is
there, no epoch ends, whatever becomes of the weights.
"""

from __future__ import annotations

import os
from typing import Any

from continuum_connector.scheduler.epochs import Epochs
from continuum_connector.worker.worker import ContinuumWorker
from tests.server.altered.disk_always import ContinuumConnector as ContinuumConnector

_new_weights, _begin = ContinuumWorker.new_weights, Epochs.begin


def _is_faulty() -> bool:
    return os.path.exists(os.environ["TEST_FAULT_FILE"])


def new_weights(self: ContinuumWorker, how: str) -> None:
    if not _is_faulty():
        _new_weights(self, how)


def begin(self: Epochs, *args: Any) -> None:
    if not _is_faulty():
        _begin(self, *args)


ContinuumWorker.new_weights = new_weights  # type: ignore[method-assign]
Epochs.begin = begin  # type: ignore[method-assign]
