"""bench/hook_cost/calls counts the same each time, whoever else uses the machine."""

from __future__ import annotations

import pytest

from bench.hook_cost.calls import LAYERS, WORKERS, of_worker
from tests.vllm import kv_caches


@pytest.mark.skipif(not kv_caches.LAYOUTS, reason="vLLM <= 0.28")
def test_a_worker_without_orders_is_counted_hook_by_hook() -> None:
    counted = of_worker(WORKERS["a tier"], 4)
    assert counted.numbers["step"]["our_calls"] < 4 * len(LAYERS), "none for a layer"
    called = {name.rpartition(".")[2]: num for name, (num, _) in counted.functions.items()}
    assert called["wait_for_save"] == called["build_connector_worker_meta"] == 4
