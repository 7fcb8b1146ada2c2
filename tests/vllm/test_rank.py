"""Each rank reports its slots under its own number; two with one number would hide each other."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from vllm.config import ParallelConfig
from vllm.v1.worker import worker_base

from continuum_connector.vllm.served import rank as rank_in


def test_the_rank_is_the_one_that_vllms_worker_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_base.vllm.ir, "set_default_torch_wrap", lambda _wanted: None)
    config = MagicMock(parallel_config=ParallelConfig())
    for rank in (3, 0):
        worker_base.WorkerBase(config, 0, rank, "tcp://nobody")
        assert rank_in(config) == rank


def test_a_worker_without_a_rank_does_not_pass_for_the_first() -> None:
    config = MagicMock(parallel_config=MagicMock(spec=()))
    with pytest.raises(AttributeError):
        rank_in(config)
